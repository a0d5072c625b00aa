"""CostModel: load or recompute, from two speeds, and an engine that follows the answer."""

import pytest

from .. import cost_model
from .. import engine as engine_module
from ..config import EngineConfig
from ..cost_model import CostModel
from ..llm import LLM
from .scripted import scripted_engine


@pytest.mark.parametrize("bytes_per_token, is_preferred", [(999, True), (1001, False)])
def test_faster_option_wins(bytes_per_token, is_preferred):
    """Loading 1,000 bytes takes as long as computing a token: 2 ms. The cost of the store doesn't matter."""
    model = CostModel(load_bytes_per_second=5e5, store_bytes_per_second=1.0, tokens_per_second=500)
    faster = "loading" if is_preferred else "computing"
    assert model.prefers_load(bytes_per_token) == is_preferred, f"with {bytes_per_token:,} bytes, {faster} is faster"


@pytest.mark.parametrize("load_is_faster, num_blocks", [(True, 8), (False, 0)])
def test_auto_measures_once_and_has_a_tier_only_if_loading_is_faster(
    checkpoint, monkeypatch, load_is_faster, num_blocks
):
    measured = [CostModel(1e12, 1e12, 1.0) if load_is_faster else CostModel(1.0, 1.0, 1e12)]
    monkeypatch.setattr(engine_module, "measure", lambda *args: measured.pop())
    engine = scripted_engine(checkpoint, 8, enable_prefix_caching=True, offload_policy="auto")
    found = engine.host_tier.pool.num_blocks
    assert found == num_blocks and not measured, f"the host must have {num_blocks} blocks, and has {found}"


@pytest.mark.parametrize(
    "options, num_blocks",
    [
        ({"offload_policy": "load"}, 8),
        ({"offload_policy": "load", "kv_offloading_tokens": 50}, 12),
        ({"offload_policy": "load", "kv_offloading_tokens": 0}, 0),
        ({"offload_policy": "recompute"}, 0),
        ({"offload_policy": "auto", "kv_offloading_tokens": 0}, 0),
        ({"offload_policy": "auto", "enable_prefix_caching": False}, 0),
    ],
    ids=str,
)
def test_nothing_is_measured_if_there_is_nothing_to_choose(checkpoint, monkeypatch, options, num_blocks):
    monkeypatch.setattr(engine_module, "measure", lambda *args: 1 / 0)
    engine = scripted_engine(checkpoint, 8, **{"enable_prefix_caching": True} | options)
    assert engine.host_tier.pool.num_blocks == num_blocks


@pytest.mark.parametrize("name, value", [("offload_policy", "never"), ("kv_offloading_tokens", -4)])
def test_invalid_option_is_a_value_error_with_its_value(name, value):
    with pytest.raises(ValueError, match=f"{name} must be .+ not {value}"):
        EngineConfig(**{name: value})


def test_speeds_are_what_was_moved_or_computed_in_a_second(checkpoint, monkeypatch):
    """Storing takes half a second, loading a quarter, and the prefill of 63 tokens 2 seconds."""
    seconds = iter([0.5, 0.25, 2.0])
    monkeypatch.setattr(cost_model, "best_time", lambda work, kv_cache: next(seconds))
    llm = LLM(checkpoint, block_size=4, kv_cache_tokens=64)
    speeds, num_bytes = llm.llm_engine.cost_model, llm.kv_cache.blocks[0].nbytes * min(cost_model.NUM_BLOCKS, 16)
    assert speeds == CostModel(num_bytes * 4, num_bytes * 2, 63 / 2)


def test_time_of_work_is_that_of_its_faster_run(checkpoint, monkeypatch):
    kv_cache = LLM(checkpoint, block_size=4, kv_cache_tokens=64, offload_policy="load").kv_cache
    clock, runs = iter([10.0, 13.0, 20.0, 22.0]), []
    monkeypatch.setattr(cost_model.time, "perf_counter", lambda: next(clock))
    assert cost_model.best_time(runs.append, kv_cache) == 2.0 and runs == [0, 1]


def test_measuring_leaves_the_engine_as_new(checkpoint):
    """A new engine has computed, stored and cached nothing."""
    llm = LLM(checkpoint, block_size=4, kv_cache_tokens=64)
    speeds = llm.llm_engine.cost_model
    assert min(speeds.load_bytes_per_second, speeds.store_bytes_per_second, speeds.tokens_per_second) > 0
    assert (llm.model_runner.num_steps, llm.model_runner.num_tokens) == (0, 0)
    assert llm.kv_cache_manager.num_free_blocks == 16 and not llm.llm_engine.has_unfinished_requests()
    assert llm.llm_engine.host_tier.num_blocks_stored == 0 and not llm.kv_cache_manager.pool.cached
