"""CostModel: load or recompute, from two speeds; how they are measured; and how an engine uses them."""

from dataclasses import replace
from itertools import count

import pytest

from ... import build
from ...engine.observer import Observer
from ...llm import LLM
from ...llm_engine import LLMEngine
from ...options.config import EngineConfig
from ...tiers import cost_model, host_tier, setup
from ...tiers.cost_model import CostModel, HitPolicy, measure
from ...tiers.host_tier import HostTier
from ..testing.engines import params, run_to_the_end, scripted_engine
from ..testing.pools import make_cache

# A token has 1,000 bytes: loading it takes 2 ms, and so does computing it.
EVEN = CostModel(load_bytes_per_second=5e5, store_bytes_per_second=1e6, tokens_per_second=500)
LOAD_IS_FASTER, RECOMPUTE_IS_FASTER = CostModel(1e12, 1e12, 1.0), CostModel(1.0, 1.0, 1e12)


def test_faster_option_wins():
    assert replace(EVEN, load_bytes_per_second=5.5e5).prefers_load(1000)
    assert not replace(EVEN, tokens_per_second=550).prefers_load(1000)


def test_hit_is_used_as_far_as_that_saves_the_most_time():
    """A block takes 1 s to compute, 0.5 s to load from the host, and 2 s from the disk. N is on the device."""
    cache = make_cache(2)
    host, size = HostTier(cache.blocks, 1, Observer()), cache.blocks[0].nbytes
    host.store(0, b"H")
    speeds = CostModel(2 * size, 1, 4), CostModel(size / 2, 1, 4)
    policy = HitPolicy(host, cache, *speeds)
    sources: dict[str, bytes | None] = {"H": b"H", "D": b"D", "N": None}
    worth = {
        text: policy.num_worth_loading([sources[letter] for letter in text])
        for text in ("", "N", "H", "D", "HH", "DN", "DNN", "HDH", "HDHHH", "NDN", "NDD")
    }
    assert worth == dict(zip(worth, (0, 1, 1, 0, 2, 2, 3, 1, 5, 3, 1), strict=True))


def test_disk_that_could_not_be_measured_is_tried():
    cache = make_cache(2)
    policy = HitPolicy(HostTier(cache.blocks, 0, Observer()), cache, RECOMPUTE_IS_FASTER, None)
    assert policy.num_worth_loading([b"a", b"b"]) == 2
    policy.on_timed("disk", 2, seconds=1.0)
    assert policy.num_worth_loading([b"a", b"b"]) == 0


@pytest.mark.parametrize("is_slow", [False, True])
def test_load_from_the_host_corrects_its_speed(checkpoint, speeds, monkeypatch, is_slow):
    """Time passes when the clock is read: none, or a second for a block."""
    times = count(0.0, float(is_slow))
    monkeypatch.setattr(host_tier, "perf_counter", lambda: next(times))
    speeds.append(CostModel(1e6, 1e12, 1000.0, num_tokens=1000))
    engine = scripted_engine(checkpoint, 8, offload_policy="auto")
    first, second = list(range(20)), list(range(100, 120))
    loaded = []
    for prompt in (first, second, first, second):
        before = engine.host_tier.num_blocks_loaded
        engine.add_request("a", prompt, params(1))
        run_to_the_end(engine)
        loaded.append(engine.host_tier.num_blocks_loaded - before)
    assert loaded[:2] == [0, 0] and loaded[2] > 0 and (loaded[3] > 0) != is_slow


# The engine's use of it


@pytest.fixture
def speeds(monkeypatch: pytest.MonkeyPatch) -> list[CostModel]:
    """Return the measurements of one engine after another, each of which may measure once."""
    to_come: list[CostModel] = []
    monkeypatch.setattr(build, "measure", lambda *parts: to_come.pop(0))
    return to_come


@pytest.mark.parametrize(("measured_model", "num_blocks"), [(LOAD_IS_FASTER, 8), (RECOMPUTE_IS_FASTER, 0)])
def test_auto_policy_measures_once_and_stores_only_if_loading_is_faster(checkpoint, speeds, measured_model, num_blocks):
    speeds.append(measured_model)
    engine = scripted_engine(checkpoint, 8, offload_policy="auto")
    assert engine.tiers.cost_model is measured_model and not speeds
    assert engine.host_tier.num_blocks == num_blocks


def test_decision_uses_the_models_bytes_per_token(checkpoint, speeds):
    """256 bytes per token."""
    for tokens_per_second, num_blocks in ((999, 8), (1001, 0)):
        speeds.append(CostModel(256 * 1000, 1e12, tokens_per_second))
        engine = scripted_engine(checkpoint, 8, offload_policy="auto")
        assert engine.kv_cache.bytes_per_token == 256 and engine.host_tier.num_blocks == num_blocks


@pytest.mark.parametrize(("policy", "num_blocks"), [("load", 8), ("recompute", 0)])
def test_explicit_policy_measures_nothing(checkpoint, speeds, policy, num_blocks):
    engine = scripted_engine(checkpoint, 8, offload_policy=policy)
    assert engine.tiers.cost_model is None and engine.host_tier.num_blocks == num_blocks


NOTHING_TO_STORE = [
    {"kv_offloading_tokens": 0},
    {"kv_offloading_tokens": 3},  # less than a block
    {"enable_prefix_caching": False},
    {"max_model_len": 4},  # a full block, but no token after it: it can never be hit
    {"max_model_len": 1},
]


@pytest.mark.parametrize("policy", ["load", "auto", "recompute"])
@pytest.mark.parametrize("options", NOTHING_TO_STORE, ids=str)
def test_nothing_is_measured_without_a_second_tier(checkpoint, speeds, policy, options):
    engine = scripted_engine(checkpoint, 8, offload_policy=policy, **options)
    assert engine.host_tier.num_blocks == 0 and engine.tiers.cost_model is None


@pytest.mark.parametrize(("tokens", "num_blocks"), [(None, 8), (4, 1), (15, 3), (400, 100)])
def test_host_has_the_configured_number_of_blocks_or_the_devices(checkpoint, tokens, num_blocks):
    engine = scripted_engine(checkpoint, 8, kv_offloading_tokens=tokens)
    assert engine.host_tier.num_blocks == num_blocks


def test_default_host_pool_stays_below_its_limit(checkpoint, monkeypatch):
    block_bytes = scripted_engine(checkpoint, 8).kv_cache.blocks[0].nbytes
    monkeypatch.setattr(setup, "MAX_DEFAULT_BYTES", 3 * block_bytes + 1)
    assert scripted_engine(checkpoint, 8).host_tier.num_blocks == 3
    assert scripted_engine(checkpoint, 8, kv_offloading_tokens=32).host_tier.num_blocks == 8


def test_host_pool_that_does_not_fit_is_a_clear_error(checkpoint):
    with pytest.raises(ValueError, match=r"^host memory has no room for a pool of 250,000,000,000,000 blocks, "):
        LLM(checkpoint, block_size=4, kv_cache_tokens=32, offload_policy="load", kv_offloading_tokens=10**15)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"offload_policy": "never"}, "^offload_policy must be one of auto, load, recompute, got 'never'$"),
        ({"offload_policy": ""}, "^offload_policy must be one of auto, load, recompute, got ''$"),
        ({"kv_offloading_tokens": -1}, r"^kv_offloading_tokens must be .*, got -1$"),
    ],
)
def test_invalid_option_is_refused_with_its_value(options, error):
    with pytest.raises(ValueError, match=error):
        EngineConfig(**options)


# The measurement


@pytest.fixture
def engine(checkpoint) -> LLMEngine:
    return LLM(checkpoint, block_size=4, kv_cache_tokens=64, offload_policy="load").llm_engine


def measured(engine: LLMEngine, num_tokens: int = 20) -> CostModel:
    return measure(engine.kv_cache, engine.executor, engine.input_processor, num_tokens, list)


def test_speeds_are_what_was_moved_or_computed_in_a_second(engine, monkeypatch):
    """Storing takes half a second, loading a quarter, and the prefill of 16 tokens 2 seconds."""
    seconds = iter([0.5, 0.25, 2.0])
    monkeypatch.setattr(cost_model, "NUM_FEW_TOKENS", 16)
    monkeypatch.setattr(cost_model, "best_time", lambda work, kv_cache: next(seconds))
    num_bytes = min(cost_model.NUM_MEASURED_BLOCKS, 16) * engine.kv_cache.blocks[0].nbytes
    assert measured(engine, 16) == CostModel(num_bytes * 4, num_bytes * 2, 8.0, num_tokens=16)


@pytest.mark.parametrize(
    ("load_seconds", "agreed", "lengths"),
    [(0.7, 1, [4]), (0.9, 0, [4, 20]), (0.7, 0, [4, 20])],  # the last: it is close on another rank
)
def test_long_prefill_is_measured_only_if_a_short_one_cannot_decide(engine, monkeypatch, load_seconds, agreed, lengths):
    """20 tokens of 32 that are loaded take 5/8 of `load_seconds`. The short prefill takes half a second."""
    seconds, launched, said = iter([1.0, load_seconds, 0.5, 1.0]), [], []
    launch = engine.executor.launch
    monkeypatch.setattr(cost_model, "NUM_FEW_TOKENS", 4)
    monkeypatch.setattr(engine.executor, "launch", lambda batch, *_: launched.append(batch[0][1]) or launch(batch))
    monkeypatch.setattr(
        cost_model, "best_time", lambda work, kv_cache: [work(each) for each in (0, 1)] and next(seconds)
    )
    cost = measure(
        engine.kv_cache, engine.executor, engine.input_processor, 20, lambda values: said.extend(values) or [agreed]
    )
    assert launched == [each for each in lengths for _ in range(2)] and said == [int(load_seconds < 0.8)]
    assert cost.tokens_per_second == lengths[-1] / (0.5 if len(lengths) == 1 else 1.0) and cost.num_tokens == 20


def test_time_of_work_is_that_of_its_faster_run(engine, monkeypatch):
    clock, runs = iter([10.0, 13.0, 20.0, 22.0]), []
    monkeypatch.setattr(cost_model.time, "perf_counter", lambda: next(clock))
    assert cost_model.best_time(runs.append, engine.kv_cache) == 2.0 and runs == [0, 1]


def test_all_speeds_are_positive_numbers(engine):
    speeds = measured(engine)
    for speed in (speeds.load_bytes_per_second, speeds.store_bytes_per_second, speeds.tokens_per_second):
        assert 0 < speed < float("inf")


def test_a_disk_is_compared_with_a_long_prefill(checkpoint, tmp_path, monkeypatch):
    may_be_short = []
    monkeypatch.setattr(build, "measure", lambda *parts: may_be_short.append(parts[4] is not None) or LOAD_IS_FASTER)
    for disk in ({}, {"kv_disk_dir": str(tmp_path)}):
        LLM(checkpoint, block_size=4, kv_cache_tokens=64, offload_policy="auto", **disk)
    assert may_be_short == [True, False]


def test_measuring_leaves_no_trace(checkpoint, engine):
    """Engines with and without a measurement differ only in the contents of the pool."""
    measured = LLM(checkpoint, block_size=4, kv_cache_tokens=64, offload_policy="auto").llm_engine
    assert measured.tiers.cost_model is not None
    manager, runner, host = measured.kv_cache_manager, measured.executor, measured.host_tier
    assert (runner.num_steps, runner.num_tokens, measured.kv_cache.num_blocks_copied) == (0, 0, 0)
    assert (host.num_blocks_stored, host.num_blocks_loaded) == (0, 0)
    assert manager.prefix_cache_stats == engine.kv_cache_manager.prefix_cache_stats
    assert manager.pool.free == engine.kv_cache_manager.pool.free and not manager.pool.cached
    assert manager.peak == engine.kv_cache_manager.peak and not measured.has_unfinished_requests()
    manager.check_integrity()


@pytest.mark.parametrize(
    ("options", "num_tokens"),
    [({}, 63), ({"kv_cache_tokens": 24}, 24), ({"max_num_batched_tokens": 10}, 10), ({"max_model_len": 12}, 11)],
)
def test_prefill_is_measured_with_the_longest_possible_prompt(checkpoint, options, num_tokens, monkeypatch):
    lengths = []
    monkeypatch.setattr(build, "measure", lambda *parts: lengths.append(parts[3]) or LOAD_IS_FASTER)
    engine = LLM(checkpoint, **{"block_size": 4, "kv_cache_tokens": 256, "offload_policy": "auto"} | options).llm_engine
    assert lengths == [num_tokens]
    assert engine.kv_cache_manager.num_free_blocks == engine.kv_cache_manager.num_blocks
    engine.kv_cache_manager.check_integrity()


@pytest.mark.parametrize("options", [{"max_model_len": 5}, {"kv_cache_tokens": 4}, {"kv_offloading_tokens": 4}])
def test_smallest_engines_can_be_measured(checkpoint, options):
    config = {"block_size": 4, "kv_cache_tokens": 64, "offload_policy": "auto"} | options
    engine = LLM(checkpoint, **config).llm_engine
    assert engine.tiers.cost_model is not None and engine.executor.num_tokens == 0
