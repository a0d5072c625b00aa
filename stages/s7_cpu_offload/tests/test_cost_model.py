"""CostModel: swap or recompute, from two speeds; how they are measured; and who decides without them."""

from dataclasses import replace

import pytest
import torch

from ..config import EngineConfig
from ..cost_model import BLOCKS, ROUNDS, CostModel, copy_speed, measure, prefill_speed
from ..engine import LLMEngine
from ..llm import LLM
from ..offload import Traffic
from ..sampling import SamplingParams
from .scripted import scripted_engine

# A token has 1,000 bytes: out and in again takes 2 ms, to compute it 2 ms too.
EVEN = CostModel(bytes_per_second=1e6, tokens_per_second=500)


def test_a_swap_goes_both_ways():
    assert EVEN.swap_seconds(1000) == pytest.approx(0.002)
    assert EVEN.recompute_seconds(1) == pytest.approx(0.002)


@pytest.mark.parametrize("num_tokens", [1, 16, 1024])
def test_the_faster_one_wins_and_at_break_even_nothing_is_copied(num_tokens):
    faster_link = replace(EVEN, bytes_per_second=1.1e6)
    faster_model = replace(EVEN, tokens_per_second=550)
    assert faster_link.prefers_swap(1000 * num_tokens, num_tokens)
    assert not faster_model.prefers_swap(1000 * num_tokens, num_tokens)
    even = CostModel(bytes_per_second=2.0**20, tokens_per_second=2.0**9)  # powers of two: no rounding
    assert not even.prefers_swap(1024 * num_tokens, num_tokens)


def test_more_bytes_a_token_speak_for_computing_and_more_tokens_a_byte_for_a_swap():
    assert [EVEN.prefers_swap(num_bytes, 10) for num_bytes in (9_000, 11_000)] == [True, False]
    assert [EVEN.prefers_swap(10_000, num_tokens) for num_tokens in (9, 11)] == [False, True]


def test_it_says_both_speeds():
    assert str(CostModel(12.34e9, 5678.9)) == "copies 12.3 GB/s, prefill 5,679 tokens/s"


# The engine asks it


def test_it_weighs_whole_blocks_of_bytes_against_tokens(checkpoint):
    """4 blocks of 4 slots of 256 bytes: as long as 16 tokens."""
    engine = scripted_engine(checkpoint, 8, preemption="auto")
    engine.cost_model = CostModel(bytes_per_second=2 * 256 * 1000, tokens_per_second=1000)
    assert engine.kv_cache.bytes_per_token == 256
    assert [engine.prefers_swap(4, num_tokens) for num_tokens in (15, 17)] == [False, True]


@pytest.mark.parametrize(("preemption", "prefers"), [("swap", True), ("recompute", False)])
def test_without_a_choice_the_knob_says_it(checkpoint, preemption, prefers):
    engine = LLM(checkpoint, block_size=4, kv_cache_tokens=32, preemption=preemption).llm_engine
    assert engine.cost_model is None, "nothing to choose, nothing to measure"
    assert engine.prefers_swap(1, 10**6) == engine.prefers_swap(10**6, 1) == prefers


@pytest.mark.parametrize("preemption", ["swap", "auto", "recompute"])
@pytest.mark.parametrize("tokens", [0, 3])
def test_without_a_block_on_the_host_there_is_no_swap(checkpoint, preemption, tokens):
    config = {"block_size": 4, "kv_cache_tokens": 32, "preemption": preemption, "swap_space_tokens": tokens}
    engine = LLM(checkpoint, **config).llm_engine
    assert engine.host_pool.num_blocks == 0 and engine.cost_model is None
    assert not engine.prefers_swap(1, 10**6)
    assert [len(o.token_ids) for o in LLM(checkpoint, **config).generate([[5, 6]])[0].outputs] == [16]


@pytest.mark.parametrize(("tokens", "num_blocks"), [(None, 8), (4, 1), (15, 3), (400, 100)])
def test_the_host_has_as_many_blocks_as_were_asked_for_or_as_the_device(checkpoint, tokens, num_blocks):
    engine = scripted_engine(checkpoint, 8, swap_space_tokens=tokens)
    assert engine.host_pool.num_blocks == num_blocks


@pytest.mark.parametrize(
    ("knobs", "error"),
    [
        ({"preemption": "never"}, "preemption must be one of auto, swap, recompute, not 'never'"),
        ({"preemption": ""}, "preemption must be one of auto, swap, recompute, not ''"),
        ({"swap_space_tokens": -1}, "swap_space_tokens must be 0 or above, not -1"),
    ],
)
def test_a_bad_knob_is_refused_with_its_value(knobs, error):
    with pytest.raises(ValueError, match=error):
        EngineConfig(**knobs)


# Measured


@pytest.fixture
def engine(checkpoint) -> LLMEngine:
    return LLM(checkpoint, block_size=4, kv_cache_tokens=64, preemption="swap").llm_engine


def test_both_speeds_are_numbers_of_this_machine(engine):
    speeds = measure(engine)
    assert 0 < speeds.bytes_per_second < float("inf") and 0 < speeds.tokens_per_second < float("inf")


def test_to_measure_leaves_no_trace(engine, checkpoint):
    pristine = LLM(checkpoint, block_size=4, kv_cache_tokens=64, preemption="swap").llm_engine
    measure(engine)
    manager = engine.kv_cache_manager
    assert (engine.model_runner.num_steps, engine.model_runner.num_tokens) == (0, 0)
    assert engine.host_pool.stored == engine.host_pool.loaded == Traffic()
    assert (manager.prefix_cache.stats.queried, manager.prefix_cache.stats.hit) == (0, 0)
    assert not manager.prefix_cache._index and not manager.is_copying
    assert manager._pool._free == pristine.kv_cache_manager._pool._free
    assert manager._host._free == pristine.kv_cache_manager._host._free
    assert engine.peak == pristine.peak and not engine.has_unfinished_requests()
    assert engine.kv_cache.num_blocks_copied == 0
    manager.check_integrity()


def test_an_engine_that_measured_says_what_one_says_that_did_not(checkpoint):
    """Those that draw too: no request has taken a seed."""
    params = SamplingParams(temperature=1.0, max_tokens=8, ignore_eos=True)
    said = [
        LLM(checkpoint, block_size=4, kv_cache_tokens=64, preemption=preemption).generate([[5, 6, 7]] * 3, params)
        for preemption in ("swap", "auto")
    ]
    tokens = [[output.outputs[0].token_ids for output in outputs] for outputs in said]
    assert tokens[0] == tokens[1]


def test_copies_are_measured_both_ways_and_of_few_blocks(engine, monkeypatch):
    seen: list[tuple[str, dict[int, int]]] = []
    for verb in ("store", "load"):
        copy = getattr(engine.host_pool, verb)
        monkeypatch.setattr(engine.host_pool, verb, lambda what, v=verb, c=copy: (seen.append((v, what)), c(what))[1])
    engine.kv_cache.blocks.normal_()
    before = engine.kv_cache.blocks.clone()
    copy_speed(engine.host_pool)
    assert seen == [("store", {i: i for i in range(BLOCKS)}), ("load", {i: i for i in range(BLOCKS)})] * ROUNDS
    assert torch.equal(engine.kv_cache.blocks, before)


def test_a_copy_s_speed_is_one_way(engine, monkeypatch):
    """8 blocks there and 8 back in a second: 16 blocks a second."""
    clock = iter(range(100))
    monkeypatch.setattr("time.perf_counter", lambda: float(next(clock)))
    monkeypatch.setattr(type(engine.host_pool), "_copy", lambda *_: type("Done", (), {"wait": lambda self: None})())
    assert copy_speed(engine.host_pool) == 2 * 8 * engine.host_pool.bytes_per_block


@pytest.mark.parametrize(
    ("knobs", "num_tokens"),
    [({}, 63), ({"kv_cache_tokens": 24}, 24), ({"max_num_batched_tokens": 10}, 10), ({"max_model_len": 12}, 11)],
)
def test_a_prefill_is_measured_on_a_prompt_as_long_as_it_may_be(checkpoint, knobs, num_tokens):
    config = {"block_size": 4, "kv_cache_tokens": 256, "preemption": "swap"} | knobs
    engine = LLM(checkpoint, **config).llm_engine
    prefill_speed(engine)
    assert engine.model_runner.num_tokens == ROUNDS * num_tokens
    assert engine.kv_cache_manager.num_free_blocks == engine.kv_cache_manager.num_blocks
    engine.kv_cache_manager.check_integrity()


@pytest.mark.parametrize("knobs", [{"max_model_len": 1}, {"kv_cache_tokens": 4}, {"swap_space_tokens": 4}])
def test_the_smallest_engines_are_measured_too(checkpoint, knobs):
    config = {"block_size": 4, "kv_cache_tokens": 64, "preemption": "auto"} | knobs
    engine = LLM(checkpoint, **config).llm_engine
    assert (engine.cost_model is None) == (engine.max_model_len == 1), "no prompt is short enough for that one"
    assert (engine.model_runner.num_tokens, engine.host_pool.stored.num_blocks) == (0, 0)
