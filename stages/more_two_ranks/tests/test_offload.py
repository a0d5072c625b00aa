"""Evicted blocks go to the host, and return when they are hit: a request waits for its blocks while others run."""

import pytest

from ..block_pool import BlockPool
from ..engine import LLMEngine
from ..observer import Observer
from ..outputs import RequestOutput
from ..prefix_cache import BlockHash, extend_block_hashes
from ..sampling import SamplingParams
from ..sequence import Sequence
from .scripted import BLOCK_SIZE, add, check, run, scripted_engine, slow_loads, step, tokens_alone, tokens_of_all

TEXT = list(range(10, 26))  # four blocks


@pytest.fixture
def engine(checkpoint) -> LLMEngine:
    return scripted_engine(checkpoint, num_blocks=6, enable_prefix_caching=True, kv_offloading_tokens=64)


def computed(engine: LLMEngine, prompt: list[int], n: int = 1) -> int:
    """Return how many tokens a request for one token computes, and check that its output is the one without a cache."""
    before = engine.model_runner.num_tokens
    engine.add_request("x", prompt, SamplingParams(max_tokens=1, seed=0, n=n))
    alone = [tokens_alone(prompt, 1, sample_index=i) for i in range(n)]
    assert tokens_of_all(run(engine)["x"]) == alone, "the output differs from the one without a cache"
    return engine.model_runner.num_tokens - before


def drive_out(engine: LLMEngine, prompt: list[int]) -> None:
    """Compute a prompt, and let another request take all blocks of the device."""
    computed(engine, prompt)
    add(engine, "z", 24, max_tokens=1)
    run(engine)


def loaded(engine: LLMEngine) -> int:
    return engine.host_tier.num_blocks_loaded


def hashes_of(prompt: list[int]) -> list[BlockHash]:
    hashes: list[BlockHash] = []
    extend_block_hashes(hashes, prompt, BLOCK_SIZE)
    return hashes


@pytest.mark.parametrize("has_tier", [True, False])
def test_an_evicted_block_is_handed_on_if_there_is_a_tier(has_tier):
    """A pool has one block, which is cached under hash a, and no holder. It is taken for other tokens."""
    handed_on: list[tuple[int, BlockHash]] = []
    on_evict = (lambda *evicted: handed_on.append(evicted)) if has_tier else None
    pool = BlockPool(1, Observer(), on_evict)
    pool.cache_block(*pool.get_new_blocks(1), b"a")
    pool.free_blocks([0])
    pool.get_new_blocks(1)
    expected = [(0, b"a")] if has_tier else []
    assert handed_on == expected, f"on_evict() must get {expected}, it got {handed_on}"


def test_evicted_blocks_are_on_the_host(engine):
    """A prompt of four blocks is computed. The next request needs the whole device."""
    hashes = hashes_of(TEXT)
    computed(engine, TEXT)
    assert [block_hash in engine.host_tier for block_hash in hashes] == [False] * 4, "no block has been evicted yet"
    add(engine, "z", 24, max_tokens=1)
    step(engine)
    assert [block_hash in engine.host_tier for block_hash in hashes] == [True] * 4, "all four have been evicted"
    check(engine)


def test_evicted_blocks_are_loaded_instead_of_computed(engine):
    """A prompt of four blocks is on the host. It comes again: three blocks are hit, the last one is computed."""
    drive_out(engine, TEXT)
    num_computed = computed(engine, TEXT)
    assert num_computed == 4, f"12 of the 16 tokens are on the host, and {num_computed} were computed"
    assert loaded(engine) == 3


def test_only_blocks_that_the_device_lacks_are_loaded(engine):
    """A prompt of two blocks loads the first and computes the second. Then four blocks need only the third."""
    drive_out(engine, TEXT)
    assert computed(engine, TEXT[:8]) == 4 and loaded(engine) == 1, "the first block is loaded, the second computed"
    assert computed(engine, TEXT) == 4, "three blocks are hit"
    assert loaded(engine) == 1 + 1, "the first two blocks are on the device since the request before"


def test_a_loaded_block_is_hit_on_the_device_from_then_on(engine):
    """A prompt of four blocks is on the host. It comes three times, and loads three blocks the first time."""
    drive_out(engine, TEXT)
    assert [computed(engine, TEXT) for _ in range(2)] == [4, 4], "three blocks are hit each time"
    assert loaded(engine) == 3, "the second request must find the blocks that the first one has loaded"
    seq, hits = hits_of(engine, TEXT)
    engine.kv_cache_manager.allocate(seq, hits)
    assert engine.host_tier.loads == [], "all hits are on the device: no load must be started, not even an empty one"


def test_loaded_blocks_are_found_in_their_own_places(engine):
    """A prompt hits a block on the device and two on the host. It comes again, and hits all three on the device."""
    drive_out_all_but_the_first(engine, TEXT)
    assert computed(engine, TEXT) == 4 and loaded(engine) == 2
    assert computed(engine, TEXT) == 4
    assert loaded(engine) == 2, "all three blocks are on the device since the request before"


def test_a_load_does_not_evict_what_it_loads(checkpoint):
    """Device and host have 4 blocks each. The load takes all of the device's, whose evicted blocks fill the host."""
    engine = scripted_engine(checkpoint, num_blocks=4, enable_prefix_caching=True, kv_offloading_tokens=16)
    computed(engine, TEXT)
    computed(engine, [7] * 16)
    assert computed(engine, TEXT) == 4 and loaded(engine) == 3


def hits_of(engine: LLMEngine, prompt: list[int]) -> tuple[Sequence, list[int | None]]:
    [seq] = engine.input_processor.process("y", prompt, SamplingParams())
    return seq, engine.kv_cache_manager.find_hits(seq)


def drive_out_all_but_the_first(engine: LLMEngine, prompt: list[int]) -> None:
    """Compute a prompt of four blocks, and let another request take five of the six blocks of the device."""
    computed(engine, prompt)
    add(engine, "z", 20, max_tokens=1)
    run(engine)


def test_a_prefix_is_found_on_both_tiers(engine):
    """Of the three blocks that may be hit, the first is on the device, and two are on the host."""
    drive_out_all_but_the_first(engine, TEXT)
    _, hits = hits_of(engine, TEXT)
    assert [block is None for block in hits] == [False, True, True], f"three blocks are cached, the hits are {hits}"
    engine.host_tier.store(hits[0], hashes_of(TEXT)[0])
    _, again = hits_of(engine, TEXT)
    assert again == hits, f"the first block is on both tiers now: the hits must still be {hits}, not {again}"


def test_a_hit_on_the_host_needs_a_block_of_the_device(engine):
    drive_out(engine, TEXT)
    seq, hits = hits_of(engine, TEXT)
    needed = engine.kv_cache_manager.num_needed(seq, hits)
    assert len(hits) == 3, f"three blocks are on the host, the hits are {hits}"
    assert needed == 4, f"the three hits on the host need a block each, and so does the rest: 4 blocks, not {needed}"


def test_an_idle_hit_on_the_device_needs_a_free_block_too(engine):
    """A prompt of four blocks hits one on the device, which no sequence holds, and two on the host."""
    drive_out_all_but_the_first(engine, TEXT)
    seq, hits = hits_of(engine, TEXT)
    assert hits[1:] == [None, None], f"the hits are {hits}"
    needed = engine.kv_cache_manager.num_needed(seq, hits)
    assert needed == 4, f"the idle hit leaves the free queue, the others need a block each: 4 blocks, not {needed}"


def test_a_held_hit_on_the_device_needs_no_free_block(engine):
    """A prompt of four blocks hits one on the device, which another sequence holds, and two on the host."""
    drive_out_all_but_the_first(engine, TEXT)
    seq, hits = hits_of(engine, TEXT)
    assert hits[1:] == [None, None], f"the hits are {hits}"
    engine.kv_cache_manager.pool.touch(hits[:1])
    needed = engine.kv_cache_manager.num_needed(seq, hits)
    assert needed == 3, f"one of the four blocks is held already: 3 free blocks are needed, not {needed}"


@pytest.mark.parametrize("options", [{"offload_policy": "recompute"}, {"kv_offloading_tokens": 0}], ids=str)
def test_evicted_blocks_are_computed_again_without_a_tier(checkpoint, options):
    engine = scripted_engine(checkpoint, num_blocks=6, enable_prefix_caching=True, **options)
    drive_out(engine, TEXT)
    assert computed(engine, TEXT) == 16
    assert (engine.host_tier.num_blocks_stored, engine.host_tier.pool.num_blocks) == (0, 0)


def test_samples_of_a_prompt_on_the_host_load_it_once(engine):
    """Two blocks of the 9 tokens are on the host, and each of three samples computes the last token."""
    drive_out(engine, TEXT[:9])
    assert computed(engine, TEXT[:9], n=3) == 3 and loaded(engine) == 2


# While blocks are on their way


def start_load(engine: LLMEngine) -> None:
    """Evict a prompt, and add a request "b" for it. It waits for its blocks while "a" runs."""
    drive_out(engine, TEXT)
    add(engine, "a", 2)
    step(engine)
    engine.add_request("b", TEXT, SamplingParams(max_tokens=4, seed=0))


def first_outputs(engine: LLMEngine, num_steps: int) -> dict[str, RequestOutput]:
    """Step, and return the first output of each request that has one."""
    outputs: dict[str, RequestOutput] = {}
    for _ in range(num_steps):
        outputs = step(engine) | outputs
    return outputs


def test_others_run_while_a_request_waits_for_its_blocks(engine):
    """The blocks of "b" are on their way for three steps. It runs in the step after that, or in the next one."""
    transfers, steps = slow_loads(engine), engine.model_runner.steps
    start_load(engine)
    for _ in range(3):
        assert list(step(engine)) == ["a"], 'the blocks of "b" have not arrived: only "a" can run'
    transfers[0].synchronize()
    first_outputs(engine, 2)
    assert ("b", 4) in steps[-2] + steps[-1], 'the blocks of "b" have arrived: its other 4 tokens can be computed'
    assert [batch[0] for batch in steps[-5:]] == [("a", 1)] * 5
    assert tokens_of_all(run(engine)["b"]) == [tokens_alone(TEXT, 4)]


def test_requests_behind_one_that_waits_for_its_blocks_run(checkpoint):
    """Request "b" has one token left to compute, and its blocks are on their way. "a" is before it, "c" behind it."""
    engine = scripted_engine(checkpoint, num_blocks=12, enable_prefix_caching=True, kv_offloading_tokens=64)
    drive_out(engine, TEXT[:13])
    add(engine, "z", 48, max_tokens=1)
    run(engine)
    slow_loads(engine)
    add(engine, "a", 2)
    engine.add_request("b", TEXT[:13], SamplingParams(max_tokens=4, seed=0))
    add(engine, "c", 2)
    for _ in range(2):
        assert sorted(step(engine)) == ["a", "c"], 'the blocks of "b" have not arrived: "a" and "c" can run'
    assert tokens_of_all(run(engine)["b"]) == [tokens_alone(TEXT[:13], 4)]


def test_a_sequence_that_waits_for_its_blocks_preempts_no_other(engine):
    """The blocks of "b" are on their way. Its samples share the last one, so each needs a copy, and none is free."""
    drive_out(engine, TEXT[:13])
    slow_loads(engine)
    engine.add_request("b", TEXT[:13], SamplingParams(max_tokens=1, seed=0, n=2))
    add(engine, "c", 5, max_tokens=3)
    outputs = [step(engine) for _ in range(2)]
    assert engine.scheduler.num_preemptions == 0, '"b" can\'t run yet, so it needs no block'
    assert engine.kv_cache_manager.num_free_blocks == 0
    assert [list(each) for each in outputs] == [["c"], ["c"]], 'the blocks of "b" have not arrived: only "c" can run'
    assert tokens_of_all(run(engine)["b"]) == [tokens_alone(TEXT[:13], 1, sample_index=i) for i in range(2)]


def test_requests_with_the_same_prompt_wait_for_one_load(checkpoint):
    """Requests "b" and "c" hit the same blocks on the host, and "a" runs in the meantime."""
    engine = scripted_engine(checkpoint, num_blocks=8, enable_prefix_caching=True, kv_offloading_tokens=64)
    drive_out(engine, TEXT)
    add(engine, "z", 32, max_tokens=1)
    run(engine)
    transfers = slow_loads(engine)
    add(engine, "a", 2)
    for name in "bc":
        engine.add_request(name, TEXT[:14], SamplingParams(max_tokens=1, seed=0))
    assert list(step(engine)) == ["a"], 'the blocks of "b" and "c" have not arrived: only "a" can run'
    assert len(transfers) == 1
    transfers[0].synchronize()
    assert {"b", "c"} <= first_outputs(engine, 2).keys(), 'the blocks of "b" and "c" have arrived: both can run'


def test_the_engine_waits_for_a_load_if_nothing_else_can_run(engine):
    """The only request waits for its blocks. Two steps later it must have its token."""
    drive_out(engine, TEXT)
    transfers = slow_loads(engine)
    engine.add_request("b", TEXT, SamplingParams(max_tokens=1, seed=0))
    outputs = first_outputs(engine, 3)
    assert transfers[0].has_arrived, "nothing else can run, so the engine must wait for the load"
    assert tokens_of_all(outputs["b"]) == [tokens_alone(TEXT, 1)]


def test_samples_of_a_cached_prompt_run_while_another_request_waits_for_its_blocks(checkpoint):
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
    assert tokens_of_all(outputs["c"]) == [tokens_alone(prompt, 1, sample_index=i) for i in range(2)]
    assert len(transfers) == 1 and not transfers[0].has_arrived


def test_an_aborted_request_gives_up_its_loading_blocks_when_they_have_arrived(engine):
    """Request "b" holds four blocks, and three of them are on their way when it is aborted."""
    transfers, manager = slow_loads(engine), engine.kv_cache_manager
    start_load(engine)
    step(engine)
    num_free = manager.num_free_blocks
    engine.abort_request("b")
    check(engine)
    assert not transfers[0].has_arrived, "an abort must not wait"
    assert manager.num_free_blocks == num_free + 1, "three of the four blocks are still being written"
    transfers[0].synchronize()
    step(engine)
    assert manager.num_free_blocks == num_free + 4, "the load has arrived: all four blocks are free"
    run(engine)


@pytest.mark.parametrize("is_aborted", [False, True])
def test_integrity_holds_when_a_load_has_arrived_but_is_not_collected(engine, is_aborted):
    transfers = slow_loads(engine)
    start_load(engine)
    step(engine)
    transfers[0].synchronize()
    if is_aborted:
        engine.abort_request("b")
    check(engine)


def test_a_preempted_request_hits_the_blocks_that_its_load_brings(engine):
    """Request "a" outgrows its blocks while "b" waits for a load. So "b" is preempted, and its load goes on."""
    transfers = slow_loads(engine)
    start_load(engine)
    for _ in range(7):
        step(engine)
    assert engine.scheduler.num_preemptions == 1 and not transfers[0].has_arrived
    outputs = run(engine)
    assert tokens_of_all(outputs["b"]) == [tokens_alone(TEXT, 4)]
    assert loaded(engine) == 3, "one load is enough"


def test_the_last_running_sequence_waits_for_blocks_that_a_load_holds(checkpoint):
    """The pool has three blocks. In the end "a" needs all of them, and the load of "b", preempted, holds one."""
    engine = scripted_engine(checkpoint, num_blocks=3, enable_prefix_caching=True, kv_offloading_tokens=64)
    computed(engine, TEXT[:8])
    computed(engine, [7] * 12)
    slow_loads(engine)
    prompt = add(engine, "a", 3, max_tokens=10)
    step(engine)
    engine.add_request("b", TEXT[:8], SamplingParams(max_tokens=1, seed=0))
    outputs = run(engine)
    assert engine.scheduler.num_preemptions > 0
    assert tokens_of_all(outputs["a"]) == [tokens_alone(prompt, 10)], '"a" fits the pool once the load has arrived'
    assert tokens_of_all(outputs["b"]) == [tokens_alone(TEXT[:8], 1)]


def test_a_prompt_that_needs_the_whole_pool_waits_for_the_load_of_an_aborted_request(checkpoint):
    """Request "a" runs, so the engine doesn't wait for the load of "b". Then both are aborted."""
    engine = scripted_engine(checkpoint, num_blocks=3, enable_prefix_caching=True, kv_offloading_tokens=64)
    computed(engine, TEXT[:8])
    computed(engine, [7] * 12)
    transfers = slow_loads(engine)
    add(engine, "a", 2)
    engine.add_request("b", TEXT[:8], SamplingParams(max_tokens=1, seed=0))
    step(engine)
    for name in "ab":
        engine.abort_request(name)
    assert not transfers[0].has_arrived, "the load still holds a block of the three"
    prompt = add(engine, "c", 11, max_tokens=1)
    assert tokens_of_all(run(engine)["c"]) == [tokens_alone(prompt, 1)]
