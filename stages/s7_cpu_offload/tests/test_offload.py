"""Evicted blocks go to the host, and come back when they are hit: a request waits for its blocks while others run."""

import pytest

from ..beam_search import BeamSearchParams
from ..engine import LLMEngine
from ..llm import LLM
from ..sampling import SamplingParams
from .scripted import add, check, run, said_alone, said_by_all, scripted_engine, slow_loads, step

TEXT = list(range(10, 26))  # four blocks


@pytest.fixture
def engine(checkpoint) -> LLMEngine:
    return scripted_engine(checkpoint, num_blocks=6, enable_prefix_caching=True, kv_offloading_tokens=64)


def computed(engine: LLMEngine, prompt: list[int], n: int = 1) -> int:
    """Return how many tokens go through the model for a request of one token. It must say what it says alone."""
    before = engine.model_runner.num_tokens
    engine.add_request("x", prompt, SamplingParams(max_tokens=1, seed=0, n=n))
    assert said_by_all(run(engine)["x"]) == [said_alone(prompt, 1, sample_index=i) for i in range(n)]
    return engine.model_runner.num_tokens - before


def drive_out(engine: LLMEngine, prompt: list[int]) -> None:
    """Compute a text, and let another one take all blocks of the device."""
    computed(engine, prompt)
    add(engine, "z", 24, max_tokens=1)
    run(engine)


def loaded(engine: LLMEngine) -> int:
    return engine.host_tier.num_blocks_loaded


def test_a_text_that_is_evicted_is_on_the_host_from_then_on(engine):
    [seq] = engine.input_processor.process("y", TEXT, SamplingParams())
    engine.kv_cache_manager.find_hits(seq)  # so that it has hashes
    computed(engine, TEXT)
    assert [block_hash in engine.host_tier for block_hash in seq.block_hashes] == [False] * 4
    add(engine, "z", 24, max_tokens=1)
    step(engine)
    assert [block_hash in engine.host_tier for block_hash in seq.block_hashes] == [True] * 4
    check(engine)


def test_a_text_that_was_evicted_is_loaded_and_not_computed_again(engine):
    drive_out(engine, TEXT)
    assert computed(engine, TEXT) == 4 and loaded(engine) == 3


def test_only_what_the_device_does_not_have_is_loaded(engine):
    """Two blocks of the text are computed again, by a request that is too short to hit the second one."""
    drive_out(engine, TEXT)
    assert computed(engine, TEXT[:8]) == 4 and loaded(engine) == 1
    assert computed(engine, TEXT) == 4 and loaded(engine) == 1 + 1


def test_a_loaded_block_is_found_on_the_device_from_then_on(engine):
    drive_out(engine, TEXT)
    assert [computed(engine, TEXT) for _ in range(2)] == [4, 4] and loaded(engine) == 3


def test_a_load_makes_room_for_itself_and_not_at_the_cost_of_what_it_loads(checkpoint):
    """The host has room for 4 blocks, and evicting 4 of the device for the load fills it."""
    engine = scripted_engine(checkpoint, num_blocks=4, enable_prefix_caching=True, kv_offloading_tokens=16)
    computed(engine, TEXT)
    computed(engine, [7] * 16)
    assert computed(engine, TEXT) == 4 and loaded(engine) == 3


def test_a_block_on_the_host_needs_a_block_of_the_device(engine):
    drive_out(engine, TEXT)
    [seq] = engine.input_processor.process("y", TEXT, SamplingParams())
    hits = engine.kv_cache_manager.find_hits(seq)
    assert hits == [None] * 3 and engine.kv_cache_manager.num_needed(seq, hits) == 4


@pytest.mark.parametrize("options", [{"offload_policy": "recompute"}, {"kv_offloading_tokens": 0}], ids=str)
def test_without_a_tier_nothing_is_stored_and_evicted_text_is_computed_again(checkpoint, options):
    engine = scripted_engine(checkpoint, num_blocks=6, enable_prefix_caching=True, **options)
    drive_out(engine, TEXT)
    assert computed(engine, TEXT) == 16
    assert (engine.host_tier.num_blocks_stored, engine.host_tier.pool.num_blocks) == (0, 0)


def test_samples_of_a_text_on_the_host_load_it_once(engine):
    drive_out(engine, TEXT[:9])
    assert computed(engine, TEXT[:9], n=3) == 3 and loaded(engine) == 2


# While blocks are on their way


def start_load(engine: LLMEngine) -> str:
    """Drive a text out, and add a request for it, which waits for its blocks beside one that runs."""
    drive_out(engine, TEXT)
    add(engine, "a", 2)
    step(engine)
    engine.add_request("b", TEXT, SamplingParams(max_tokens=4, seed=0))
    return "b"


def test_others_run_while_one_waits_for_its_blocks_and_it_runs_when_they_have_arrived(engine):
    transfers, steps = slow_loads(engine), engine.model_runner.steps
    start_load(engine)
    for _ in range(3):
        assert list(step(engine)) == ["a"]
    transfers[0].synchronize()
    step(engine)
    assert steps[-1] == [("a", 1), ("b", 4)]
    assert said_by_all(run(engine)["b"]) == [said_alone(TEXT, 4)]


def test_a_second_request_for_the_same_text_waits_for_the_same_load(checkpoint):
    engine = scripted_engine(checkpoint, num_blocks=8, enable_prefix_caching=True, kv_offloading_tokens=64)
    drive_out(engine, TEXT)
    add(engine, "z", 32, max_tokens=1)
    run(engine)
    transfers = slow_loads(engine)
    add(engine, "a", 2)
    for name in "bc":
        engine.add_request(name, TEXT[:14], SamplingParams(max_tokens=1, seed=0))
    assert list(step(engine)) == ["a"] and len(transfers) == 1
    transfers[0].synchronize()
    assert list(step(engine)) == ["a", "b", "c"]


def test_a_step_in_which_nobody_can_run_waits(engine):
    drive_out(engine, TEXT)
    transfers = slow_loads(engine)
    engine.add_request("b", TEXT, SamplingParams(max_tokens=1, seed=0))
    assert step(engine) == {} and transfers[0].has_arrived
    assert list(step(engine)) == ["b"]


def test_samples_of_a_cached_prompt_run_while_a_stranger_waits_for_its_blocks(checkpoint):
    """Two blocks of the 9 tokens of "c" are cached: its samples run in the step that admits them."""
    engine = scripted_engine(checkpoint, num_blocks=10, enable_prefix_caching=True, kv_offloading_tokens=64)
    computed(engine, TEXT)
    for _ in range(2):
        add(engine, "z", 40, max_tokens=1)
        run(engine)
    prompt = add(engine, "c", 9, max_tokens=1)
    run(engine)
    transfers = slow_loads(engine)
    engine.add_request("b", TEXT, SamplingParams(max_tokens=1, seed=0))
    engine.add_request("c", prompt, SamplingParams(max_tokens=1, seed=0, n=2))
    outputs = step(engine)
    assert said_by_all(outputs["c"]) == [said_alone(prompt, 1, sample_index=i) for i in range(2)]
    assert len(transfers) == 1 and not transfers[0].has_arrived


def test_an_abort_does_not_wait_and_the_blocks_are_free_when_they_have_arrived(engine):
    transfers = slow_loads(engine)
    name = start_load(engine)
    step(engine)
    num_free = engine.kv_cache_manager.num_free_blocks
    engine.abort_request(name)
    check(engine)
    assert not transfers[0].has_arrived and engine.kv_cache_manager.num_free_blocks == num_free + 1
    transfers[0].synchronize()
    step(engine)
    assert engine.kv_cache_manager.num_free_blocks == num_free + 4
    run(engine)


@pytest.mark.parametrize("is_aborted", [False, True])
def test_everything_is_in_its_place_when_a_load_has_arrived_and_nobody_has_collected_it(engine, is_aborted):
    transfers = slow_loads(engine)
    name = start_load(engine)
    step(engine)
    transfers[0].synchronize()
    if is_aborted:
        engine.abort_request(name)
    check(engine)


def test_a_preempted_request_leaves_its_load_alone_and_finds_its_blocks(engine):
    """Sequence "a" outgrows its block while "b" waits for a load: "b" is preempted, and "a" waits for its blocks."""
    transfers = slow_loads(engine)
    start_load(engine)
    while not engine.scheduler.num_preemptions:
        step(engine)
    assert not transfers[0].has_arrived
    outputs = run(engine)
    assert said_by_all(outputs["b"]) == [said_alone(TEXT, 4)] and loaded(engine) == 3


def test_the_last_sequence_waits_for_blocks_that_a_load_holds(checkpoint):
    """Three blocks: "a" fills one, and a load for "b" holds the other two when "a" needs them."""
    engine = scripted_engine(checkpoint, num_blocks=3, enable_prefix_caching=True, kv_offloading_tokens=64)
    computed(engine, TEXT[:8])
    computed(engine, [7] * 12)
    slow_loads(engine)
    prompt = add(engine, "a", 3, max_tokens=6)
    step(engine)
    engine.add_request("b", TEXT[:8], SamplingParams(max_tokens=1, seed=0))
    outputs = run(engine)
    assert engine.scheduler.num_preemptions > 0
    assert said_by_all(outputs["a"]) == [said_alone(prompt, 6)] and said_by_all(outputs["b"]) == [
        said_alone(TEXT[:8], 1)
    ]


def test_a_beam_search_waits_for_the_beginning_of_its_prompt(checkpoint):
    options = {"kv_cache_tokens": 40, "max_model_len": 40, "kv_offloading_tokens": 200, "offload_policy": "load"}
    llm, params = LLM(checkpoint, block_size=4, **options), BeamSearchParams(2, 4, ignore_eos=True)
    [first] = llm.beam_search(TEXT, params)
    llm.generate([7] * 36, SamplingParams(max_tokens=4, ignore_eos=True))
    slow_loads(llm.llm_engine)
    [second] = llm.beam_search(TEXT, params)
    assert said_by_all(second) == said_by_all(first) and loaded(llm.llm_engine) == 3
