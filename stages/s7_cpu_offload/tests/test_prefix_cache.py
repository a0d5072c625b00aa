"""Prefix caching: block hashes, the free queue with its cached blocks, and hits. Block size 4."""

from itertools import combinations

import pytest

from ..block_pool import BlockPool
from ..engine import LLMEngine
from ..observer import Observer
from ..prefix_cache import BlockHash, extend_block_hashes, hash_block_tokens
from ..sampling import SamplingParams
from ..sequence import Sequence
from .scripted import add, run, scripted_engine, step, tokens_alone, tokens_of, tokens_of_all

# The chained hash


def hashes_of(token_ids: list[int], block_size: int = 2) -> list[BlockHash]:
    hashes: list[BlockHash] = []
    extend_block_hashes(hashes, token_ids, block_size)
    return hashes


def test_only_full_blocks_have_a_hash():
    for count, num_full in enumerate([0, 0, 1, 1, 2, 2]):
        num_hashes = len(hashes_of([1, 2, 3, 4, 5][:count]))
        assert num_hashes == num_full, f"tokens: {count}, full blocks of 2: {num_full}, hashes: {num_hashes}"
    are_equal = hashes_of([1, 2, 3, 4, 5]) == hashes_of([1, 2, 3, 4])
    assert are_equal, "token 5 is in neither of the full blocks, and changes a hash"


def test_a_hash_depends_on_every_token_up_to_the_end_of_the_block():
    """A token's keys and values depend on all tokens before it."""
    ones, others = hashes_of([1, 2, 7, 7, 8, 8]), hashes_of([1, 3, 7, 7, 8, 8])
    are_equal = ones == hashes_of([1, 2, 7, 7, 8, 8])
    assert are_equal, "equal prefixes have different hashes"
    are_equal = ones[1] == others[1]
    assert not are_equal, "[7, 7] after [1, 2] and [7, 7] after [1, 3] have the same hash"
    are_equal = ones[2] == others[2]
    assert not are_equal, "[8, 8] after [1, 2, 7, 7] and [8, 8] after [1, 3, 7, 7] have the same hash"
    num_hashes = len(set(hashes_of([7, 7, 7, 7])))
    assert num_hashes == 2, "[7, 7] and [7, 7] after [7, 7] have the same hash"


def test_different_tokens_have_different_hashes():
    for one, other in combinations([[1, 23], [12, 3], [123], [3, 12], [1 << 30, 0], [0, 1 << 30]], 2):
        are_equal = hash_block_tokens(b"", one) == hash_block_tokens(b"", other)
        assert not are_equal, f"{one} and {other} have the same hash"


def test_a_thousand_blocks_have_a_thousand_hashes():
    num_hashes = len({hash_block_tokens(b"", [token_id, 7]) for token_id in range(1000)})
    assert num_hashes == 1000, f"1,000 different blocks have {num_hashes} hashes: two of them would be taken for one"


def test_a_growing_sequence_keeps_its_hashes():
    """A sequence is hashed seven times, and it is one token longer each time."""
    hashes: list[BlockHash] = []
    for count in range(8):
        extend_block_hashes(hashes, [5, 6, 7, 8, 9, 10, 11][:count], block_size=2)
    assert len(hashes) == 3, f"7 tokens fill 3 blocks of 2, and have {len(hashes)} hashes"
    are_equal = hashes == hashes_of([5, 6, 7, 8, 9, 10, 11])
    assert are_equal, "the same tokens have other hashes if they are hashed at once"


# The free queue


def pool_with(cached: dict[bytes, int]) -> BlockPool:
    """Return a pool of 6 blocks, all held, some of which are cached."""
    pool = BlockPool(6, Observer())
    pool.get_new_blocks(6)
    assert pool.ref_counts == [1] * 6, f"all six blocks were taken, the counts of their holders are {pool.ref_counts}"
    for block_hash, block in cached.items():
        pool.cache_block(block, block_hash)
    hashes = {block: block_hash for block_hash, block in cached.items()}
    assert pool.cached == cached, f"cache_block() must leave {cached} in `cached`, it leaves {pool.cached}"
    assert pool.hashes == hashes, f"cache_block() must leave {hashes} in `hashes`, it leaves {pool.hashes}"
    return pool


def take_all(pool: BlockPool, num_free: int) -> list[int]:
    """Take all blocks. So many must be free."""
    free = list(pool.free)
    assert len(free) == num_free, f"{num_free} blocks have no holder, and the free queue is {free}"
    return pool.get_new_blocks(num_free)


def test_cached_blocks_are_taken_last():
    """Blocks 0 and 3 of 6 are cached. All are freed, one by one."""
    pool = pool_with({b"a": 0, b"b": 3})
    for block in range(6):
        pool.free_blocks([block])
    taken = take_all(pool, 6)
    assert taken[4:] == [0, 3], f"blocks are taken as {taken}: the cached blocks 0 and 3 must come last"


def test_the_end_of_a_prefix_is_evicted_before_its_beginning():
    """A block table [4, 1, 3] is freed, and all of its blocks are cached."""
    pool = pool_with({b"a": 4, b"b": 1, b"c": 3})
    pool.free_blocks([4, 1, 3])
    taken = take_all(pool, 3)
    assert taken == [3, 1, 4], f"they are taken as {taken}: without its beginning, the rest of a prefix can't be hit"


def test_the_least_recently_used_block_is_evicted_first():
    """Blocks 1, 0 and 2 are freed in this order. Then block 1 is hit, and freed again."""
    pool = pool_with({b"a": 0, b"b": 1, b"c": 2})
    for block in (1, 0, 2):
        pool.free_blocks([block])
    pool.touch([1])
    pool.free_blocks([1])
    taken = take_all(pool, 3)
    assert taken == [0, 2, 1], f"they are taken as {taken}: block 0 is the least recently used one, and 1 was hit again"


def test_a_hit_takes_a_block_out_of_the_free_queue():
    pool = pool_with({b"a": 0, b"b": 1, b"c": 2})
    pool.free_blocks([0, 1, 2])
    pool.touch([1])
    assert sorted(pool.free) == [0, 2], "block 1 was hit: a block that is held must leave the free queue"
    assert pool.cached[b"b"] == 1, "block 1 was hit, and must stay cached"
    pool.check_integrity([1, 3, 4, 5])


def test_an_evicted_block_is_no_longer_found_and_can_be_cached_again():
    """The only free block is cached under hash a. It is taken, and then cached under hash b."""
    pool = pool_with({b"a": 0})
    pool.free_blocks([0])
    assert take_all(pool, 1) == [0], "block 0 is the only free block"
    assert b"a" not in pool.cached, "block 0 was taken for other tokens, but hash a still leads to it"
    assert not pool.hashes, f"block 0 was taken for other tokens, and still has a hash: {pool.hashes}"
    pool.cache_block(0, b"b")
    assert pool.cached == {b"b": 0}, "block 0 has other tokens now: hash b leads to it"


def test_the_first_of_two_equal_blocks_stays_cached():
    """Blocks 0 and 1 hold the same tokens. Block 0 was cached first."""
    pool = pool_with({b"a": 0})
    pool.cache_block(1, b"a")
    assert pool.cached == {b"a": 0}, "block 0 must stay the block of hash a"
    pool.free_blocks([0, 1])
    assert take_all(pool, 2) == [1, 0], "block 1 is not cached, so it must be taken first"


def test_the_observer_hears_which_blocks_are_cached_and_evicted():
    events: list[tuple] = []

    class Recorder(Observer):
        def tell(self, kind: str, *details: object) -> None:
            events.append((kind, *details))

    pool = BlockPool(2, Recorder())
    pool.cache_block(*pool.get_new_blocks(1), b"a")
    pool.free_blocks([0])
    pool.get_new_blocks(2)
    expected = [("cache", 0, b"a"), ("evict", 0, b"a", "taken")]
    assert events == expected, f"tell() was called with {events}, and should be called with {expected}"


# Hits


@pytest.fixture
def engine(checkpoint) -> LLMEngine:
    return scripted_engine(checkpoint, num_blocks=16, enable_prefix_caching=True)


def sequence(engine: LLMEngine, prompt: list[int]) -> Sequence:
    [seq] = engine.input_processor.process("y", prompt, SamplingParams())
    return seq


def computed(engine: LLMEngine, prompt: list[int], max_tokens: int = 1, n: int = 1) -> int:
    """Return how many tokens a request computes, and check that its output is the one without a cache."""
    before = engine.model_runner.num_tokens
    engine.add_request("x", prompt, SamplingParams(max_tokens=max_tokens, n=n, seed=0))
    output = run(engine)["x"]
    assert tokens_of_all(output) == [tokens_alone(prompt, max_tokens, sample_index=i) for i in range(n)]
    return engine.model_runner.num_tokens - before


TEXT = list(range(10, 26))  # four blocks


def test_full_blocks_of_an_earlier_prompt_are_hit(engine):
    """A prompt of 14 tokens comes twice, and then one of 16 that begins with it: three blocks are hit each time."""
    assert [computed(engine, TEXT[:14]), computed(engine, TEXT[:14]), computed(engine, TEXT)] == [14, 2, 4]


@pytest.mark.parametrize("num_tokens, num_hits", [(8, 1), (9, 2), (4, 0), (5, 1), (3, 0)])
def test_the_last_token_of_a_prompt_is_always_computed(engine, num_tokens, num_hits):
    """All of its blocks are cached, but without the logits of its last token there is no next one."""
    computed(engine, TEXT)
    found = len(engine.kv_cache_manager.find_hits(sequence(engine, TEXT[:num_tokens])))
    assert found == num_hits, f"a prompt of {num_tokens} tokens hits {found} blocks, and must hit {num_hits}"
    assert computed(engine, TEXT[:num_tokens]) == num_tokens - 4 * num_hits


def test_equal_tokens_after_a_different_beginning_are_not_hit(engine):
    """A prompt of four blocks is cached. It comes again with another first token, and then without its first block."""
    computed(engine, TEXT)
    assert computed(engine, [9, *TEXT[1:]]) == 16 and computed(engine, TEXT[4:]) == 12, "a block was hit"


def test_hits_end_at_the_first_block_that_is_not_cached(engine):
    """Of the four blocks of a prompt, the first and the third are cached."""
    pool, hashes = engine.kv_cache_manager.pool, hashes_of(TEXT, block_size=4)
    first, third = pool.get_new_blocks(2)
    pool.cache_block(first, hashes[0])
    pool.cache_block(third, hashes[2])
    hits = engine.kv_cache_manager.find_hits(sequence(engine, TEXT))
    assert hits == [first], "the second block is missing: the third one is not the second of the table"


def test_generated_tokens_are_hit_like_a_prompt(engine):
    """A prompt of 5 tokens and its output of 8 begin the next prompt, of 14: 12 of these tokens are cached."""
    computed(engine, TEXT[:5], max_tokens=8)
    assert computed(engine, [*TEXT[:5], *tokens_alone(TEXT[:5], 8), 9]) == 14 - 12


def test_only_computed_blocks_are_hit(checkpoint):
    """The first request has computed 5 of its 16 tokens when the second one looks for hits: one full block."""
    engine = scripted_engine(checkpoint, num_blocks=16, max_num_batched_tokens=5, enable_prefix_caching=True)
    engine.add_request("a", TEXT, SamplingParams(max_tokens=1, seed=0))
    step(engine)
    hits = engine.kv_cache_manager.find_hits(sequence(engine, TEXT))
    assert len(hits) == 1, f"{len(hits)} blocks are hit, and only one of them is computed"


def test_running_requests_share_the_blocks_of_their_common_prefix(engine):
    """The first request has computed 9 tokens when the second one comes, with the same 9 and 2 more."""
    add(engine, "a", 9)
    step(engine)
    add(engine, "a2", 11)
    step(engine)
    first, second = engine.scheduler.running
    assert first.block_table[:2] == second.block_table[:2]
    assert engine.model_runner.steps[1] == [("a", 1), ("a2", 3)]
    assert engine.kv_cache_manager.num_free_blocks == 16 - 4


def test_equal_prompts_in_one_step_are_both_computed_and_cached_once(engine):
    prompts = [add(engine, name, 9, max_tokens=1) for name in ("a", "a2")]
    outputs = run(engine)
    assert engine.model_runner.steps == [[("a", 9), ("a2", 9)]]
    assert [tokens_of(output) for output in outputs.values()] == [tokens_alone(prompt, 1) for prompt in prompts]
    assert len(engine.kv_cache_manager.pool.cached) == 2


def test_a_hit_needs_a_free_block_only_while_no_sequence_holds_it(checkpoint):
    """A prompt of 3 blocks hits two. They cost nothing while another request holds them; idle, they are free blocks."""
    engine = scripted_engine(checkpoint, num_blocks=5, enable_prefix_caching=True)
    manager, seq = engine.kv_cache_manager, sequence(engine, TEXT[:12])
    engine.add_request("a", TEXT[:9], SamplingParams(max_tokens=2, seed=0))
    step(engine)
    assert manager.num_needed(seq, manager.find_hits(seq)) == 1, "both hits are held: only the third block is needed"
    run(engine)
    assert len(manager.find_hits(seq)) == 2
    assert manager.num_needed(seq, manager.find_hits(seq)) == 3, "both hits are idle: they leave the free queue, too"


def test_admission_does_not_evict_its_own_hits(checkpoint):
    """A prompt of four blocks hits the two least recently used ones of a pool of four, and evicts the other two."""
    engine = scripted_engine(checkpoint, num_blocks=4, enable_prefix_caching=True)
    computed(engine, TEXT[:8])
    computed(engine, [7] * 8)
    assert computed(engine, TEXT) == 8


def test_a_preempted_request_hits_its_own_blocks(checkpoint):
    """Of its three blocks two are full. The older request takes the third, and the other two stay cached."""
    engine = scripted_engine(checkpoint, num_blocks=5, enable_prefix_caching=True)
    prompts = {name: add(engine, name, num_tokens, max_tokens=4) for name, num_tokens in (("a", 7), ("b", 9))}
    outputs = run(engine)
    assert engine.scheduler.num_preemptions == 1
    assert engine.model_runner.steps[-2:] == [[("b", 3)], [("b", 1)]]
    assert [tokens_of(outputs[name]) for name in "ab"] == [tokens_alone(prompts[name], 4) for name in "ab"]


def test_stats_count_the_tokens_of_each_admission_and_those_that_were_cached(engine):
    for num_tokens in (14, 14, 9):
        computed(engine, TEXT[:num_tokens])
    stats = engine.kv_cache_manager.prefix_cache_stats
    assert (stats.queries, stats.hits) == (14 + 14 + 9, 12 + 8), "prompts of 14, 14 and 9 tokens hit 0, 12 and 8"


def test_nothing_is_hit_if_the_cache_is_turned_off(checkpoint):
    engine = scripted_engine(checkpoint, num_blocks=16, enable_prefix_caching=False)
    assert [computed(engine, TEXT) for _ in range(2)] == [16, 16], "all 16 tokens are computed each time"


def test_samples_of_a_cached_prompt_run_in_the_step_that_admits_it(engine):
    """Two blocks of the prompt are cached, and only the last of its 9 tokens is left: each sample computes it."""
    assert computed(engine, TEXT[:9], n=2) == 8 + 2
    num_steps = len(engine.model_runner.steps)
    assert computed(engine, TEXT[:9], n=2) == 2
    assert len(engine.model_runner.steps) == num_steps + 1
