"""Statistics of the pool and the queues, and counts since the engine started. They add no work to a step."""

import sys
from pathlib import Path

import pytest

from .. import LLM, BeamSearchParams, Counter, EngineStats, Gauge, Histogram, SamplingParams
from ..metrics import Observations, token_bounds
from ..tiers.host_tier import Load
from .test_vllm_names import DATA
from .testing.engines import OPTIONS

PROMPT = [3, 17, 4, 29, 8, 15, 40, 22, 9, 31]  # 2 blocks of 4 tokens, and half of a third


def make(checkpoint, **options) -> LLM:
    return LLM(checkpoint, **({"block_size": 4, "watermark": 0.1} | OPTIONS | options))


def drawn(max_tokens: int = 4, **params) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=1.0, seed=1, ignore_eos=True, **params)


def test_new_engine_has_counted_nothing(checkpoint):
    stats = make(checkpoint, kv_cache_tokens=80).stats()
    zeros = {name for name, value in vars(stats).items() if not value}
    assert {*vars(stats)} - zeros == {"num_blocks", "num_host_blocks", "blocks_free", "blocks_watermark"}
    assert (stats.num_blocks, stats.blocks_free, stats.blocks_watermark, stats.num_host_blocks) == (20, 20, 2, 20)


def test_blocks_and_queues_at_each_moment(checkpoint):
    llm = make(checkpoint, kv_cache_tokens=80, max_num_seqs=2, max_num_batched_tokens=6)
    engine = llm.llm_engine
    for i in range(3):
        engine.add_request(str(i), [10 * i + each for each in range(9)], drawn(6))
    stats = engine.stats()
    assert (stats.running, stats.waiting, stats.blocks_running) == (0, 3, 0)
    engine.step()  # 6 of the first prompt's 9 tokens
    stats = engine.stats()
    assert (stats.running, stats.waiting, stats.blocks_running, stats.blocks_free) == (1, 2, 3, 17)
    assert (stats.prompt_tokens, stats.generation_tokens) == (0, 0), "its prompt is not computed yet"
    engine.step()
    stats = engine.stats()
    assert (stats.running, stats.waiting, stats.preempted, stats.blocks_running) == (2, 1, 0, 6)
    assert (stats.prompt_tokens, stats.generation_tokens) == (9, 1)
    while engine.has_unfinished_requests():
        engine.step()
        stats = engine.stats()
        assert stats.blocks_running + stats.blocks_idle + stats.blocks_free == stats.num_blocks == 20
    assert (stats.running, stats.waiting, stats.blocks_running, stats.blocks_idle) == (0, 0, 0, 9)
    assert (stats.prompt_tokens, stats.generation_tokens, stats.out_of_blocks) == (27, 18, 0)


def test_prefix_hits_continue_through_a_reset(checkpoint):
    llm = make(checkpoint)
    for _ in range(2):
        llm.generate(PROMPT, drawn(1))
    before = llm.stats()
    assert (before.prefix_queries, before.prefix_hits, before.cached_tokens) == (20, 8, 8)
    llm.llm_engine.add_request("running", PROMPT, drawn(2))
    llm.llm_engine.step()
    running = llm.stats()
    assert (running.prompt_tokens, running.cached_tokens) == (30, 16)
    llm.llm_engine.abort_request("running")
    assert llm.reset_prefix_cache()
    after = llm.stats()
    assert (after.prefix_queries, after.prefix_hits, after.blocks_idle) == (30, 16, 0)
    llm.generate(PROMPT, drawn(1))
    assert (llm.stats().prefix_queries, llm.stats().prefix_hits) == (40, 16)


def test_counts_of_a_pool_that_is_too_small_for_all_requests(checkpoint):
    """Two prompts of 3 blocks each are admitted to 9 blocks and grow, until one is preempted."""
    llm = make(checkpoint, kv_cache_tokens=36, watermark=0.0)
    engine = llm.llm_engine
    for i in range(4):
        engine.add_request(str(i), [10 * i + each for each in range(9)], drawn(16))
    waited = preempted = 0
    while engine.has_unfinished_requests():
        engine.step()
        stats = engine.stats()
        waited, preempted = max(waited, stats.waiting), max(preempted, stats.preempted)
        assert stats.preempted <= stats.waiting
    assert waited >= 2 and preempted >= 1
    assert stats.preemptions > 0 and stats.preemptions == engine.scheduler.num_preemptions
    assert stats.out_of_blocks > stats.preemptions, "a waiting sequence needs blocks in each step"
    assert (stats.prompt_tokens, stats.generation_tokens) == (36, 64)
    assert stats.blocks_stored == engine.host_tier.num_blocks_stored > 0
    assert stats.blocks_on_host == len(engine.host_tier.pool.cached) > 0


def test_sequence_that_outgrows_the_pool_counts_as_out_of_blocks(checkpoint):
    llm = make(checkpoint, kv_cache_tokens=12)
    with pytest.warns(UserWarning, match="were not served"):
        llm.generate(PROMPT, drawn(20))
    stats = llm.stats()
    assert (stats.out_of_blocks, stats.preemptions, stats.generation_tokens) == (1, 0, 3)


def test_failed_step_does_not_count_as_out_of_blocks(checkpoint):
    engine = make(checkpoint).llm_engine
    engine.add_request("0", PROMPT, drawn())
    engine.step()
    engine.scheduler.preempt_all()
    stats = engine.stats()
    assert (stats.preemptions, stats.out_of_blocks, stats.waiting, stats.preempted) == (1, 0, 1, 1)


def test_samples_copies_and_loads_are_counted(checkpoint):
    llm = make(checkpoint, kv_cache_tokens=40, watermark=0.0)
    llm.generate(PROMPT, drawn(2, n=3))
    stats = llm.stats()
    assert stats.blocks_copied == 2 and (stats.prompt_tokens, stats.generation_tokens) == (10, 6)
    llm.generate([*range(40, 79)], drawn(1))  # it takes all blocks
    llm.generate(PROMPT, drawn(1))
    assert llm.stats().blocks_loaded == 2


def test_sequence_that_waits_for_its_blocks_to_load_is_loading(checkpoint, monkeypatch):
    llm = make(checkpoint, kv_cache_tokens=40, watermark=0.0)
    engine = llm.llm_engine
    for prompt in (PROMPT, [*range(40, 79)]):
        llm.generate(prompt, drawn(1))
    engine.add_request("0", PROMPT, drawn())
    monkeypatch.setattr(Load, "has_arrived", lambda load: False)
    engine.scheduler.schedule()
    assert (engine.stats().running, engine.stats().loading) == (1, 1)
    monkeypatch.undo()
    assert engine.stats().loading == 0


def test_samples_of_a_waiting_prompt_count(checkpoint):
    engine = make(checkpoint).llm_engine
    engine.add_request("0", PROMPT, drawn(n=3))
    assert engine.stats().waiting == 3
    engine.step()
    assert (engine.stats().waiting, engine.stats().running) == (0, 3)


def test_str_shows_everything_on_one_line(checkpoint):
    llm = make(checkpoint, kv_cache_tokens=80)
    for prompt in (PROMPT, PROMPT[:5]):
        llm.generate(prompt, drawn(3))
    line = str(llm.stats())
    assert line == (
        "running 0 (0 loading), waiting 0 (0 preempted) | blocks: 0 running, 3 idle, 17 free of 20, watermark 2, "
        "0 on the host | 0 preemptions, 0 times out of blocks, 0 copied, 0 stored, 0 loaded | prefix hits: 27% | "
        "tokens: 15 prompt, 6 generated"
    )
    assert "prefix hits: none" in str(make(checkpoint).stats()) and isinstance(llm.stats(), EngineStats)


# Cost


def calls_of(function) -> set[tuple[str, str]]:
    """Return the (file, function) of every Python call that `function` makes."""
    calls = set()

    def note(frame, event, argument) -> None:
        if event == "call":
            calls.add((Path(frame.f_code.co_filename).name, frame.f_code.co_name))

    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(None)
    return calls


COUNTING = {"stats.py", "tally.py"}


def test_preempted_fork_counts_as_preempted_and_is_looked_up_once(checkpoint):
    engine = make(checkpoint, kv_cache_tokens=200).llm_engine
    engine.add_request("0", PROMPT, drawn(20, n=3))
    for _ in range(4):
        engine.step()
    lookups = engine.tally.device_lookups
    queries, queued = lookups.queries, engine.tally.observed["vllm:request_queue_time_seconds"]
    engine.scheduler.preempt_all()
    assert engine.stats().preempted == 3
    before = queued.histogram("", {}).count
    engine.step()
    assert engine.stats().preempted == 0 and engine.stats().running == 3
    assert (lookups.queries, queued.histogram("", {}).count) == (queries, before) == (len(PROMPT), 3)


def test_statistics_add_no_calls_to_a_step_in_which_no_request_starts_or_ends(checkpoint):
    engine = make(checkpoint, kv_cache_tokens=200).llm_engine
    for i in range(4):
        engine.add_request(str(i), [10 * i + each for each in range(9)], drawn(20, n=2))
    for _ in range(4):
        engine.step()
    calls = calls_of(lambda: [engine.step() for _ in range(6)])
    assert ("scheduler.py", "schedule") in calls, "the profile covers the step"
    assert not {call for call in calls if call[0] in COUNTING}
    assert ("stats.py", "collect") in calls_of(engine.stats)


def test_finished_request_is_counted_once(checkpoint):
    engine = make(checkpoint).llm_engine
    engine.add_request("0", PROMPT, drawn(2))
    engine.step()
    calls = {call for call in calls_of(engine.step) if call[0] in COUNTING}
    assert ("tally.py", "on_finish") in calls
    assert engine.tally.ended == {"length": 1}
    engine.add_request("1", PROMPT, drawn(2, n=3))
    engine.abort_request("1")
    assert engine.tally.ended == {"length": 1, "abort": 3} and engine.stats().prompt_tokens == 10


# Metrics


def test_metrics_have_vllms_names(checkpoint):
    llm = make(checkpoint, served_model_name=["fox", "rabbit"])
    llm.generate([PROMPT, PROMPT], [drawn(3), drawn(1, n=2)])
    metrics = llm.get_metrics()
    assert {metric.name for metric in metrics} <= {*DATA["metrics"]["metrics"], "vllm:cache_config_info"}
    assert all(metric.labels["model_name"] == "fox" and metric.labels["engine"] == "0" for metric in metrics)
    values = {metric.name: metric.value for metric in metrics if isinstance(metric, Counter | Gauge)}
    assert values["vllm:prompt_tokens"] == 20 and values["vllm:generation_tokens"] == 5
    assert values["vllm:num_requests_running"] == values["vllm:kv_cache_usage_perc"] == 0
    success = [metric for metric in metrics if metric.name == "vllm:request_success"]
    assert {metric.labels["finished_reason"]: metric.value for metric in success if metric.value} == {"length": 3}
    histograms = {metric.name: metric for metric in metrics if isinstance(metric, Histogram)}
    tokens = histograms["vllm:request_generation_tokens"]
    assert (tokens.count, tokens.sum) == (3, 5) and tokens.buckets["1.0"] == 2 and tokens.buckets["5.0"] == 3
    assert all(list(each.buckets)[-1] == "+Inf" and each.buckets["+Inf"] == each.count for each in histograms.values())
    assert histograms["vllm:time_to_first_token_seconds"].count == 3


def test_times_of_a_request_add_up(checkpoint):
    llm = make(checkpoint, max_num_seqs=1, max_num_batched_tokens=4)
    llm.generate([PROMPT, PROMPT[:5]], drawn(3))
    sums = {metric.name: metric.sum for metric in llm.get_metrics() if isinstance(metric, Histogram)}
    queue, prefill, decode, inference, latency = (
        sums[f"vllm:{name}_seconds"]
        for name in (
            *("request_queue_time", "request_prefill_time", "request_decode_time", "request_inference_time"),
            "e2e_request_latency",
        )
    )
    assert min(queue, prefill, decode) > 0
    assert prefill + decode == pytest.approx(inference) and queue + inference == pytest.approx(latency)
    assert sums["vllm:request_time_per_output_token_seconds"] == pytest.approx(decode / 2)  # 3 tokens have 2 gaps


def test_request_that_never_ran_has_no_inference_time(checkpoint):
    llm = make(checkpoint)
    llm.llm_engine.add_request("0", PROMPT, drawn(3))
    llm.llm_engine.abort_request("0")
    counts = {metric.name: metric.count for metric in llm.get_metrics() if isinstance(metric, Histogram)}
    assert counts["vllm:e2e_request_latency_seconds"] == 1
    assert {counts[f"vllm:request_{part}_time_seconds"] for part in ("queue", "prefill", "decode", "inference")} == {0}


def test_longest_sample_of_each_request_is_counted(checkpoint):
    llm = make(checkpoint, max_num_seqs=2)
    llm.generate([PROMPT, PROMPT[:5]], [drawn(3), drawn(2, n=5)])
    longest = {metric.name: metric for metric in llm.get_metrics()}["vllm:request_max_num_generation_tokens"]
    assert isinstance(longest, Histogram) and (longest.count, longest.sum) == (2, 3 + 2)


def test_options_of_the_kv_cache_are_labels_of_a_metric(checkpoint):
    llm = make(checkpoint, kv_cache_tokens=80)
    [info] = [metric for metric in llm.get_metrics() if metric.name == "vllm:cache_config_info"]
    assert isinstance(info, Gauge) and info.value == 1
    assert info.labels.items() >= {"block_size": "4", "num_gpu_blocks": "20", "enable_prefix_caching": "True"}.items()


def test_histogram_counts_values_up_to_each_bound():
    observed = Observations((1, 2, 5))
    for value in (0, 1, 1.5, 2, 7):
        observed.add(value)
    histogram = observed.histogram("name", {})
    assert histogram.buckets == {"1.0": 2, "2.0": 4, "5.0": 4, "+Inf": 5}
    assert (histogram.count, histogram.sum) == (5, 11.5)
    assert token_bounds(300) == (1, 2, 5, 10, 20, 50, 100, 200)


def test_beams_are_counted_too(checkpoint):
    llm = make(checkpoint)
    llm.beam_search([PROMPT], BeamSearchParams(beam_width=2, max_tokens=3))
    stats = llm.stats()
    assert (stats.prompt_tokens, stats.generation_tokens, stats.blocks_running) == (10, 6, 0)
