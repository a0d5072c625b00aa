"""Prefix caching in an engine: what is told, what is computed, and that nobody says anything else because of it."""

import math
import random
from functools import partial

import pytest
import torch

from ..engine import LLMEngine
from ..llm import LLM
from ..outputs import RequestOutput
from ..prefix_cache import PrefixCache
from ..sampling import SamplingParams
from ..tiered_block_manager import TieredBlockManager
from .helpers import next_logits
from .scripted import answers, assert_whole, params, run_to_the_end, said_alone, scripted_engine

PROMPT = [3 + 7 * i % 300 for i in range(20)]


def serve(engine: LLMEngine, prompt: list[int], max_tokens: int = 3, **options) -> RequestOutput:
    """One request, alone, to its end."""
    engine.add_request("a", prompt, params(max_tokens, **options))
    return run_to_the_end(engine)["a"]


def test_a_prompt_whose_blocks_are_all_cached_computes_its_last_token(checkpoint):
    engine = scripted_engine(checkpoint, 16)
    serve(engine, PROMPT)
    before = engine.model_runner.num_tokens
    output = serve(engine, PROMPT[:17])
    assert engine.model_runner.num_tokens - before == 1 + 2, "its last token, and two that were sampled"
    assert output.num_cached_tokens == 16
    assert answers(output) == [said_alone(PROMPT[:17], 3)]


def test_hits_are_told_and_counted(checkpoint):
    engine = scripted_engine(checkpoint, 16)
    assert serve(engine, PROMPT).num_cached_tokens == 0
    assert serve(engine, [*PROMPT[:10], 99]).num_cached_tokens == 8
    stats = engine.kv_cache_manager.prefix_cache.stats
    assert (stats.queried, stats.hit) == (31, 8)


def test_the_same_prompt_twice_in_one_step_is_computed_twice_and_held_by_the_next_once(checkpoint):
    engine = scripted_engine(checkpoint, 32)
    for name in "ab":
        engine.add_request(name, PROMPT, params(4))
    outputs = run_to_the_end(engine)
    assert [outputs[name].num_cached_tokens for name in "ab"] == [0, 0]
    assert serve(engine, PROMPT).num_cached_tokens == 16


def test_who_comes_a_step_later_hits(checkpoint):
    engine = scripted_engine(checkpoint, 32)
    engine.add_request("a", PROMPT, params(4))
    engine.step()
    engine.add_request("b", PROMPT, params(4))
    engine.step()
    assert_whole(engine)
    held = [seq.block_table for seq in engine.scheduler.running]
    assert held[0][:4] == held[1][:4] and held[0][4] != held[1][4]
    outputs = run_to_the_end(engine)
    assert answers(outputs["b"]) == [said_alone(PROMPT, 4)] and outputs["b"].num_cached_tokens == 16


@pytest.mark.parametrize("end", ["abort", "preempt"])
def test_of_a_prompt_that_was_cut_off_only_what_was_computed_is_hit(checkpoint, end):
    engine = scripted_engine(checkpoint, 16, max_num_batched_tokens=6)
    engine.add_request("a", PROMPT, params(4))
    engine.step()  # 6 of its 20 tokens, in blocks that were all allocated
    if end == "abort":
        engine.abort_request("a")
    else:
        engine.scheduler._preempt(list(engine.scheduler.running))
    assert_whole(engine)
    before = engine.model_runner.num_tokens
    if end == "abort":
        assert serve(engine, PROMPT, max_tokens=1).num_cached_tokens == 4
    else:
        run_to_the_end(engine)
    assert engine.model_runner.num_tokens - before == 16 + (0 if end == "abort" else 3)


def test_a_prompt_finds_room_though_the_pool_is_full_of_idle_blocks(checkpoint):
    engine = scripted_engine(checkpoint, 6)
    for first in range(50, 60):
        assert answers(serve(engine, [first] * 20)) == [said_alone([first] * 20, 3)]
    assert engine.kv_cache_manager.prefix_cache.blocks.num_idle == 5


def test_found_tokens_cost_no_budget(checkpoint):
    """A step of 8 tokens: 18 tokens of which 16 are found need one step, and leave room for 6 of another's."""
    engine = scripted_engine(checkpoint, 32, max_num_batched_tokens=8)
    serve(engine, PROMPT)
    engine.add_request("a", PROMPT[:18], params(2))
    engine.add_request("b", [77] * 9, params(2))
    engine.step()
    assert engine.model_runner.steps[-1] == [("a", 2), ("b", 6)]
    run_to_the_end(engine)


def test_the_samples_of_a_prompt_hit_once(checkpoint):
    engine = scripted_engine(checkpoint, 32)
    serve(engine, PROMPT)
    before = engine.model_runner.num_tokens
    output = serve(engine, PROMPT, n=3, temperature=1.0, seed=5)
    assert answers(output) == [said_alone(PROMPT, 3, seed=5, sample_index=i) for i in range(3)]
    assert engine.model_runner.num_tokens - before == 4 + 3 * 2
    assert engine.kv_cache_manager.prefix_cache.stats.queried == 40


def test_off_nothing_is_hit(checkpoint):
    engine = scripted_engine(checkpoint, 16, enable_prefix_caching=False)
    for _ in range(2):
        assert serve(engine, PROMPT).num_cached_tokens == 0
    assert engine.model_runner.num_tokens == 2 * 22


def test_it_is_on_unless_it_is_turned_off(checkpoint):
    assert LLM(checkpoint).config.enable_prefix_caching is True


def test_a_reset_waits_until_nobody_is_served(checkpoint):
    llm = LLM(checkpoint, block_size=4)
    stream = llm.stream([PROMPT], params(5))
    next(stream)
    assert llm.reset_prefix_cache() is False
    stream.close()
    assert llm.reset_prefix_cache() is True
    assert llm.generate(PROMPT, params(1))[0].num_cached_tokens == 0


@pytest.mark.parametrize("seed", range(6))
def test_with_a_hash_that_is_always_the_same_everybody_says_what_he_says_alone(checkpoint, seed):
    rng = random.Random(seed)
    engine = scripted_engine(checkpoint, 20)
    cache = PrefixCache(4, hash_function=lambda parent, token_ids: b"same")
    engine.kv_cache_manager = TieredBlockManager(20, 4, cache, engine.host_pool)
    engine.scheduler = engine.build_scheduler()
    serve(engine, [5] * 9)  # it has the only place in the index
    for number in range(12):
        prompt = [5] * rng.randrange(1, 12) + [rng.randrange(5, 7) for _ in range(rng.randrange(8))]
        assert answers(serve(engine, prompt)) == [said_alone(prompt, 3)], number
    assert cache.stats.hit > 0


@pytest.mark.parametrize("seed", range(8))
def test_in_any_company_and_any_pool_everybody_says_what_he_says_without_a_cache(checkpoint, seed):
    """Prompts that begin alike in many ways, chunks, preemption, several samples: greedy and sampled."""
    rng = random.Random(seed)
    knobs = {"block_size": rng.choice([1, 2, 4]), "max_num_batched_tokens": rng.choice([3, 16, 64]), "watermark": 0.0}
    prompts = [PROMPT[: rng.randrange(1, 16)] + [rng.randrange(5, 8)] * rng.randrange(5) for _ in range(8)]
    wanted = [
        SamplingParams(
            n=rng.choice([1, 1, 2]), temperature=rng.choice([0.0, 1.0]), seed=i, max_tokens=8, ignore_eos=True
        )
        for i in range(8)
    ]
    llm = partial(LLM, checkpoint, kv_cache_tokens=64, **knobs)
    on, off = llm(), llm(enable_prefix_caching=False)
    expected = [answers(output) for output in off.generate(prompts, wanted)]
    for _ in range(2):
        assert [answers(output) for output in on.generate(prompts, wanted)] == expected
        on.kv_cache_manager.check_integrity()
    assert on.model_runner.num_tokens < 2 * off.model_runner.num_tokens


# prompt_logprobs


def test_the_log_probabilities_of_a_prompt_are_those_without_a_cache(checkpoint, model):
    prompt = PROMPT[:13]
    llm = LLM(checkpoint, block_size=4, max_num_batched_tokens=5)
    [output] = llm.generate(prompt, SamplingParams(prompt_logprobs=2, max_tokens=2, temperature=0.0))
    assert output.prompt_logprobs is not None and len(output.prompt_logprobs) == 13
    assert output.prompt_logprobs[0] is None
    for position in range(1, 13):
        logprobs = next_logits(model, prompt[:position]).log_softmax(-1)  # [vocab_size]
        told = output.prompt_logprobs[position]
        assert told is not None and prompt[position] in told
        assert list(told)[:2] == logprobs.topk(2).indices.tolist()
        for token_id, each in told.items():
            assert each.logprob == pytest.approx(logprobs[token_id].item(), abs=1e-4)
            assert each.rank == 1 + int((logprobs > logprobs[token_id]).sum())


def test_whoever_wants_them_reads_no_cache_and_fills_it(checkpoint):
    llm = LLM(checkpoint, block_size=4)
    wants = SamplingParams(prompt_logprobs=0, max_tokens=1, temperature=0.0)
    first, second = (llm.generate(PROMPT, wants)[0] for _ in range(2))
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 0)
    assert llm.model_runner.num_tokens == 40
    assert first.prompt_logprobs == second.prompt_logprobs
    assert llm.generate(PROMPT, params(1))[0].num_cached_tokens == 16


def test_they_are_of_float32_logits_whatever_the_model_computes_in(checkpoint):
    """So the probabilities of all tokens add up to 1, as those of sampled tokens do."""
    llm = LLM(checkpoint, block_size=4, dtype="bfloat16")
    everything = SamplingParams(prompt_logprobs=320, logprobs=320, max_tokens=1, temperature=0.0)
    [output] = llm.generate(PROMPT, everything)
    for told in (*(output.prompt_logprobs or [])[1:], *(output.outputs[0].logprobs or [])):
        assert told is not None and len(told) == 320
        assert sum(math.exp(each.logprob) for each in told.values()) == pytest.approx(1, abs=1e-5)


def test_nobody_else_gets_any(checkpoint):
    llm = LLM(checkpoint, block_size=4)
    wants = SamplingParams(prompt_logprobs=1, max_tokens=3, temperature=0.0)
    outputs = llm.generate([PROMPT, PROMPT, PROMPT[:1]], [wants, params(3), wants])
    assert [output.prompt_logprobs is None for output in outputs] == [False, True, False]
    assert outputs[2].prompt_logprobs == [None]


@pytest.mark.parametrize("n", [1, 3])
def test_a_prompt_that_is_preempted_gets_each_once_and_may_hit_when_it_has_all(checkpoint, n):
    llm = LLM(checkpoint, block_size=4, max_num_batched_tokens=6, enable_prefix_caching=True)
    wants = SamplingParams(n=n, prompt_logprobs=1, max_tokens=6, temperature=0.0, ignore_eos=True)
    [expected] = llm.generate(PROMPT, wants)
    engine = LLM(checkpoint, block_size=4, max_num_batched_tokens=6, preemption="recompute").llm_engine
    engine.add_request("a", PROMPT, wants)
    outputs: list[RequestOutput] = []
    for number in range(40):
        if number in (2, 9) and engine.scheduler.running:
            engine.scheduler._preempt(list(engine.scheduler.running))
        outputs += engine.step()
        engine.kv_cache_manager.check_integrity()
        if not engine.has_unfinished_requests():
            break
    last = outputs[-1]
    assert last.finished and answers(last) == answers(expected)
    assert last.prompt_logprobs is not None and expected.prompt_logprobs is not None
    for told, wanted in zip(last.prompt_logprobs[1:], expected.prompt_logprobs[1:], strict=True):
        assert told is not None and wanted is not None and told.keys() == wanted.keys()
        assert all(told[i].logprob == pytest.approx(wanted[i].logprob, abs=1e-4) for i in told)
    assert engine.kv_cache_manager.prefix_cache.stats.hit > 0, "the second time it came back"


@pytest.mark.parametrize("wrong", [-1, -5])
def test_a_negative_number_is_refused(wrong):
    with pytest.raises(ValueError, match=f"prompt_logprobs must be 0 or above, not {wrong}"):
        SamplingParams(prompt_logprobs=wrong)


def test_logits_of_a_prompt_are_computed_for_those_who_ask_only(checkpoint, monkeypatch):
    llm = LLM(checkpoint, block_size=4)
    rows: list[int] = []
    compute = llm.model_runner._model.compute_logits

    def watched(hidden: torch.Tensor) -> torch.Tensor:
        rows.append(len(hidden))
        return compute(hidden)

    monkeypatch.setattr(llm.model_runner._model, "compute_logits", watched)
    llm.generate(PROMPT, params(1))
    llm.generate(PROMPT, params(1, prompt_logprobs=0))
    assert rows == [1, 1, 19]
