"""PrefixCache and the pool behind it: what is found, what stays, and what is given up first.

Blocks have 4 slots. Tables are those of a new pool, which is taken from the front: 0, 1, 2, ...
"""

import random
from collections import OrderedDict
from collections.abc import Iterator

import pytest

from ..block_manager import BlockManager
from ..block_pool import NoFreeBlocks
from ..prefix_cache import Hash, PrefixCache, hash_block
from ..sampling import SamplingParams
from ..sequence import Sequence
from .helpers import make_sequence


def same_hash(parent: Hash, token_ids: list[int]) -> Hash:
    """The worst hash function there is."""
    return b"same"


def manager_of(num_blocks: int, block_size: int = 4, **options) -> BlockManager:
    return BlockManager(num_blocks, block_size, PrefixCache(block_size, **options))


def with_tokens(token_ids: list[int], name: str = "a") -> Sequence:
    seq = make_sequence(name, len(token_ids), max_tokens=50)
    seq.token_ids = list(token_ids)
    return seq


def hits(manager: BlockManager, token_ids: list[int]) -> int:
    """How many tokens of such a prompt are found; nothing changes."""
    return len(manager._hits(with_tokens(token_ids))) * manager.block_size


def computed(manager: BlockManager, token_ids: list[int], name: str = "a") -> Sequence:
    """A sequence that holds its blocks and has computed all its tokens."""
    seq = with_tokens(token_ids, name)
    manager.allocate(seq)
    seq.num_computed_tokens = seq.num_tokens
    manager.cache_blocks(seq)
    return seq


def left(manager: BlockManager, token_ids: list[int]) -> None:
    """Such a sequence has come, was computed, and has gone."""
    manager.free(computed(manager, token_ids))
    manager.check_integrity()


TEXT = list(range(10, 26))  # four blocks


# What is found


def test_a_text_that_was_computed_is_found_in_whole_blocks():
    manager = manager_of(8)
    left(manager, TEXT[:11])  # two full blocks and three tokens
    assert hits(manager, TEXT) == 8
    assert hits(manager, TEXT[:9]) == 8
    assert hits(manager, [*TEXT[:6], 99, 99, 99, 99]) == 4
    assert hits(manager, [99, *TEXT[1:]]) == 0


@pytest.mark.parametrize("num_tokens, found", [(1, 0), (4, 0), (5, 4), (8, 4), (9, 8), (16, 12)])
def test_the_last_token_is_computed_in_any_case(num_tokens, found):
    manager = manager_of(8)
    computed(manager, TEXT)
    assert hits(manager, TEXT[:num_tokens]) == found == (num_tokens - 1) // 4 * 4


@pytest.mark.parametrize("hash_function", [hash_block, same_hash])
def test_equal_tokens_after_different_prefixes_are_different(hash_function):
    manager = manager_of(16, hash_function=hash_function)
    computed(manager, [1, 1, 1, 1, 5, 5, 5, 5])
    computed(manager, [2, 2, 2, 2, 5, 5, 5, 5])
    assert hits(manager, [5, 5, 5, 5, 9]) == 0
    assert hits(manager, [3, 3, 3, 3, 5, 5, 5, 5, 9]) == 0


def test_a_hash_that_is_always_the_same_finds_less_and_never_what_is_not_there():
    manager = manager_of(16, hash_function=same_hash)
    left(manager, TEXT)
    left(manager, [7] * 8)
    assert hits(manager, TEXT) == 4, "the first of all blocks has the only place in the index"
    assert hits(manager, [7] * 9) == hits(manager, TEXT[4:]) == 0


def test_a_text_whose_hash_is_anothers_is_never_taken_for_it():
    """All first blocks have one hash. [2, ...] goes on with 6, 6, 6, 6, and [1, ...] has the place in the index."""
    manager = manager_of(16, hash_function=lambda parent, tokens: hash_block(parent, tokens) if parent else b"first")
    computed(manager, [1, 1, 1, 1, 5, 5, 5, 5])
    computed(manager, [2, 2, 2, 2, 6, 6, 6, 6], "b")
    assert hits(manager, [1, 1, 1, 1, 5, 5, 5, 5, 9]) == 8
    assert hits(manager, [1, 1, 1, 1, 6, 6, 6, 6, 9]) == 4, "6, 6, 6, 6 was computed after 2, 2, 2, 2"
    assert hits(manager, [2, 2, 2, 2, 6, 6, 6, 6, 9]) == 0
    manager.check_integrity()


def test_who_awaits_logprobs_of_its_prompt_finds_nothing():
    manager = manager_of(8)
    computed(manager, TEXT)
    seq = with_tokens(TEXT)
    assert len(manager._hits(seq)) == 3
    seq.params = SamplingParams(prompt_logprobs=0)
    assert manager._hits(seq) == []


def test_hashes_of_a_text_are_a_chain_of_its_full_blocks():
    cache, hashes = PrefixCache(2), []
    cache.extend_hashes(hashes, [1, 2, 3, 4, 5], 2)
    assert hashes == [hash_block(b"", [1, 2]), hash_block(hash_block(b"", [1, 2]), [3, 4])]
    known = list(hashes)
    cache.extend_hashes(hashes, [1, 2, 3, 4, 5, 6], 3)
    assert hashes == [*known, hash_block(known[1], [5, 6])]
    cache.extend_hashes(hashes, [1, 2, 3, 4, 5, 6], 1)
    assert len(hashes) == 3, "what is known stays"


def test_the_chain_is_made_by_the_hash_function_of_the_cache():
    hashes: list[Hash] = []
    PrefixCache(2, lambda parent, token_ids: parent + bytes(token_ids)).extend_hashes(hashes, [1, 2, 3, 4, 5], 2)
    assert hashes == [bytes([1, 2]), bytes([1, 2, 3, 4])]


def test_equal_tokens_have_one_hash_after_one_prefix_only():
    cache = PrefixCache(2)
    first, second, other = [], [], []
    cache.extend_hashes(first, [1, 2, 7, 7], 2)
    cache.extend_hashes(second, [1, 2, 7, 7, 9], 2)
    cache.extend_hashes(other, [1, 3, 7, 7], 2)
    assert first == second
    assert first[0] != other[0] and first[1] != other[1] and first[0] != first[1]


def test_the_hash_of_a_block_tells_where_its_tokens_end():
    """Two blocks of one chain are no block of twice the size, and no token is taken for two."""
    assert hash_block(hash_block(b"", [1, 2]), [3, 4]) != hash_block(b"", [1, 2, 3, 4])
    assert hash_block(b"", [258]) != hash_block(b"", [2, 1])


def test_what_was_generated_is_found_like_a_prompt():
    manager = manager_of(8)
    seq = computed(manager, TEXT[:6])
    for token_id in TEXT[6:12]:
        seq.token_ids.append(token_id)
        manager.append_slot(seq)
        seq.num_computed_tokens += 1
        manager.cache_blocks(seq)
    manager.free(seq)
    assert hits(manager, TEXT) == 12


def test_only_what_is_computed_is_found():
    manager = manager_of(8)
    seq = with_tokens(TEXT)
    manager.allocate(seq)
    manager.cache_blocks(seq)
    assert hits(manager, TEXT) == 0
    seq.num_computed_tokens = 7
    manager.cache_blocks(seq)
    assert hits(manager, TEXT) == 4
    manager.free(seq)  # preempted or aborted in the middle
    manager.check_integrity()
    assert hits(manager, TEXT) == 4


def test_without_a_cache_nothing_is_found_and_no_block_is_idle():
    manager = BlockManager(8, 4)
    seq = computed(manager, TEXT)
    assert seq.block_hashes == [], "hashed for nothing"
    manager.free(seq)
    manager.check_integrity()
    assert hits(manager, TEXT) == 0
    assert manager.prefix_cache.blocks.num_idle == 0


# Who holds it


def test_who_hits_holds_the_same_blocks_and_computes_the_rest():
    manager = manager_of(8)
    first = computed(manager, TEXT[:8])
    second = with_tokens([*TEXT[:8], 99], "b")
    manager.allocate(second)
    assert second.block_table == [*first.block_table, 2]
    assert (second.num_computed_tokens, second.num_cached_tokens) == (8, 8)
    assert [manager._pool.ref_count(block) for block in (0, 1, 2)] == [2, 2, 1]
    manager.check_integrity()


def test_a_hit_after_all_have_gone_holds_the_blocks_again():
    manager = manager_of(4)
    left(manager, TEXT[:8])
    assert manager.num_free_blocks == 4
    seq = with_tokens([*TEXT[:8], 99])
    manager.allocate(seq)
    assert seq.block_table[:2] == [0, 1]
    assert manager.num_free_blocks == 1, "what is hit is no longer counted as free"
    manager.check_integrity()


def test_of_two_blocks_with_one_text_the_first_stays():
    manager = manager_of(8)
    seqs = [with_tokens(TEXT[:8], name) for name in "ab"]
    for seq in seqs:  # admitted in one step: nothing is computed yet
        manager.allocate(seq)
    for seq in seqs:
        seq.num_computed_tokens = 8
        manager.cache_blocks(seq)
    manager.free(seqs[1])
    assert manager.prefix_cache.blocks.num_idle == 0, "the second's blocks are just free"
    late = with_tokens(TEXT[:9], "c")
    manager.allocate(late)
    assert late.block_table[:2] == seqs[0].block_table == [0, 1]
    manager.check_integrity()


def test_a_sequence_goes_on_from_a_duplicate_as_from_the_first():
    """Its later blocks are found by whoever begins with the text, in whichever block the beginning is."""
    manager = manager_of(12)
    seqs = [with_tokens(TEXT[:8], name) for name in "ab"]
    for seq in seqs:
        manager.allocate(seq)
    for seq in seqs:
        seq.num_computed_tokens = 8
        manager.cache_blocks(seq)
    second = seqs[1]
    second.token_ids += TEXT[8:12]
    manager.append_slot(second)
    second.num_computed_tokens = 12
    manager.cache_blocks(second)
    late = with_tokens(TEXT[:13], "c")
    manager.allocate(late)
    assert late.block_table[:3] == [*seqs[0].block_table, second.block_table[2]]


def test_the_rest_of_a_prompt_does_not_evict_what_it_has_just_hit():
    manager = manager_of(3)
    left(manager, TEXT[:8])  # blocks 0 and 1 are idle, 2 is free
    seq = with_tokens(TEXT[:12])
    manager.allocate(seq)
    assert seq.block_table == [0, 1, 2] and seq.num_computed_tokens == 8
    manager.check_integrity()


@pytest.mark.parametrize("num_blocks, can", [(4, True), (3, False)])
def test_what_others_hold_needs_no_room_and_what_is_idle_does(num_blocks, can):
    manager = manager_of(num_blocks)
    left(manager, TEXT[:8])
    other = with_tokens([50] * 2, "b")
    manager.allocate(other)
    seq = with_tokens(TEXT[:12])  # two idle blocks and a new one
    assert manager.can_allocate(seq) == can
    assert manager.can_allocate(seq, spare=1) is False
    if not can:
        before = [manager.num_free_blocks, manager.prefix_cache.blocks.num_idle, hits(manager, TEXT)]
        with pytest.raises(NoFreeBlocks, match="3 blocks are needed, 2 are free"):
            manager.allocate(seq)
        assert before == [manager.num_free_blocks, manager.prefix_cache.blocks.num_idle, hits(manager, TEXT)]
        assert seq.block_table == [] and seq.num_computed_tokens == 0
        manager.check_integrity()


def test_a_fork_takes_its_own_beginning_if_more_of_that_is_cached():
    """A preempted group comes back: the samples share a block, and the second one's own text is there still."""
    manager = manager_of(12)
    left(manager, [*TEXT[:4], 9, 9, 9, 9, 8, 8, 8, 8])
    parent = computed(manager, TEXT[:6])
    child = with_tokens([*TEXT[:4], 9, 9, 9, 9, 8, 8, 8, 8, 1], "b")
    manager.fork(parent, child, 4)
    assert child.num_computed_tokens == 12 and len(child.block_table) == 3
    plain = with_tokens([*TEXT[:4], 3, 3, 3, 3, 3], "c")
    manager.fork(parent, plain, 4)
    assert plain.num_computed_tokens == 4 and plain.block_table == parent.block_table[:1]
    manager.check_integrity()


# What is written is not found any more


def test_a_full_block_is_copied_if_a_fork_writes_to_it_while_others_hold_it():
    manager = manager_of(8)
    parent = computed(manager, TEXT[:8])
    child = with_tokens([*TEXT[:6], 99], "b")
    manager.fork(parent, child, 6)
    copy = manager.append_slot(child)
    assert copy is not None and copy.source == parent.block_table[1]
    assert hits(manager, TEXT) == 8, "the parent's text is still there"
    manager.check_integrity()


def test_a_full_block_that_its_only_holder_writes_to_forgets_its_text():
    manager = manager_of(8)
    parent = computed(manager, TEXT[:8])
    child = with_tokens([*TEXT[:6], 99, 98], "b")
    manager.fork(parent, child, 6)
    manager.free(parent)
    assert manager.append_slot(child) is None
    assert hits(manager, TEXT) == 4
    child.num_computed_tokens = 8
    manager.cache_blocks(child)
    assert hits(manager, [*TEXT[:6], 99, 98, 1]) == 8 and hits(manager, TEXT) == 4
    manager.check_integrity()


# Eviction


def test_free_blocks_are_taken_before_cached_ones():
    manager = manager_of(4)
    left(manager, TEXT[:8])
    left(manager, [50] * 8)  # fits beside it
    assert hits(manager, TEXT) == 8


def test_the_end_of_a_text_is_evicted_before_its_beginning():
    manager = manager_of(4)
    left(manager, TEXT)
    found = []
    for num_blocks in (1, 2, 3):
        seq = with_tokens([50] * (4 * num_blocks - 1), "b")
        manager.allocate(seq)
        found.append(hits(manager, [*TEXT, 1]))
        manager.free(seq)
        manager.check_integrity()
    assert found == [12, 8, 4]


def test_the_least_recently_used_text_is_evicted_first():
    manager = manager_of(4)
    left(manager, TEXT[:8])
    left(manager, [50] * 8)
    left(manager, TEXT[:8])  # used again
    seq = with_tokens([60] * 7, "b")
    manager.allocate(seq)
    assert hits(manager, TEXT) == 8 and hits(manager, [50] * 9) == 0
    manager.check_integrity()


def test_what_somebody_holds_is_never_evicted():
    manager = manager_of(4)
    holder = computed(manager, TEXT[:8])
    left(manager, [50] * 8)
    with pytest.raises(NoFreeBlocks, match="3 blocks are needed, 2 are free"):
        manager.allocate(with_tokens([60] * 12, "b"))
    seq = with_tokens([60] * 8, "b")
    manager.allocate(seq)
    assert hits(manager, TEXT) == 8 and hits(manager, [50] * 9) == 0
    assert set(holder.block_table).isdisjoint(seq.block_table)


def test_a_block_that_is_used_anew_forgets_its_text():
    manager = manager_of(2)
    left(manager, TEXT[:8])
    seq = with_tokens([60] * 5, "b")
    manager.allocate(seq)
    assert hits(manager, TEXT) == 0
    manager.free(seq)
    assert hits(manager, TEXT) == 0 and manager.num_free_blocks == 2


class Counting(OrderedDict):
    """Notes each key that is looked at in order."""

    touched = 0

    def __iter__(self) -> Iterator[int]:
        for block in super().__iter__():
            self.touched += 1
            yield block


def num_touched(num_blocks: int, num_evicted: int) -> int:
    """How many idle blocks are looked at to evict so many of a pool of idle ones."""
    manager = manager_of(num_blocks, block_size=1)
    left(manager, list(range(num_blocks)))
    cached = manager.prefix_cache.blocks
    assert type(cached._idle) is OrderedDict, "the first of a plain dict is found behind all that were removed"
    cached._idle = idle = Counting(cached._idle)
    assert len(idle) == num_blocks
    manager._pool.get_new_blocks(num_evicted)
    return idle.touched


def test_an_eviction_looks_at_one_block_however_many_are_idle():
    assert num_touched(60, 20) <= 20 and num_touched(20_000, 20) <= 20


# Statistics and reset


def test_tokens_queried_and_hit_are_counted_on_each_admission():
    manager = manager_of(8)
    left(manager, TEXT[:8])
    left(manager, TEXT[:12])
    assert (manager.prefix_cache.stats.queried, manager.prefix_cache.stats.hit) == (20, 8)


def test_a_reset_forgets_everything_and_loses_no_block():
    manager = manager_of(8)
    left(manager, TEXT)
    assert manager.reset_prefix_cache() is True
    assert hits(manager, TEXT) == 0
    assert (manager.num_free_blocks, manager.prefix_cache.blocks.num_idle) == (8, 0)
    assert (manager.prefix_cache.stats.queried, manager.prefix_cache.stats.hit) == (0, 0)
    manager.check_integrity()


def test_a_reset_while_somebody_holds_blocks_changes_nothing():
    manager = manager_of(8)
    computed(manager, TEXT[:8])
    assert manager.reset_prefix_cache() is False
    assert hits(manager, TEXT) == 8


# The check


def lose_an_idle_block(manager: BlockManager) -> None:
    manager.prefix_cache.blocks._idle.popitem()


def index_a_free_block(manager: BlockManager) -> None:
    free = manager._pool._free[0]
    manager.prefix_cache.insert(b"x", None, [1, 2, 3, 4], free)


def leave_the_index_behind(manager: BlockManager) -> None:
    manager.prefix_cache.blocks._cached.popitem()


def hold_an_idle_block(manager: BlockManager) -> None:
    manager._pool._ref_counts[next(iter(manager.prefix_cache.blocks._idle))] += 1


def free_an_idle_block(manager: BlockManager) -> None:
    manager._pool._free.append(next(iter(manager.prefix_cache.blocks._idle)))


@pytest.mark.parametrize(
    "spoil", [lose_an_idle_block, index_a_free_block, leave_the_index_behind, hold_an_idle_block, free_an_idle_block]
)
def test_the_check_notices(spoil):
    manager = manager_of(8)
    left(manager, TEXT[:8])
    manager.check_integrity()
    spoil(manager)
    with pytest.raises(AssertionError):
        manager.check_integrity()


# Any history


Slots = dict[tuple[int, int], list[int]]  # by block and offset: the text that was computed there, up to its token


def compute(manager: BlockManager, slots: Slots, seq: Sequence, num_tokens: int) -> None:
    for position in range(seq.num_computed_tokens, seq.num_computed_tokens + num_tokens):
        block = seq.block_table[position // manager.block_size]
        assert manager._pool.ref_count(block) == 1, "who writes to a block holds it alone"
        slots[block, position % manager.block_size] = seq.token_ids[: position + 1]
    seq.num_computed_tokens += num_tokens
    manager.cache_blocks(seq)


def assert_each_finds_its_own(slots: Slots, running: list[Sequence], block_size: int) -> None:
    for seq in running:
        for position in range(seq.num_computed_tokens):
            place = seq.block_table[position // block_size], position % block_size
            assert slots[place] == seq.token_ids[: position + 1]


@pytest.mark.parametrize("hash_function", [hash_block, same_hash])
@pytest.mark.parametrize("seed", range(20))
def test_in_any_history_who_hits_finds_what_was_computed_for_the_same_text(seed, hash_function):
    """The model of a pool: each slot has the whole text up to its token, and who hits must find its own."""
    rng = random.Random(seed)
    block_size, num_blocks = rng.choice([1, 2, 3, 4]), rng.randrange(3, 20)
    manager = manager_of(num_blocks, block_size, hash_function=hash_function)
    slots: Slots = {}
    running: list[Sequence] = []
    for number in range(150):
        if rng.random() < 0.5:
            seq = with_tokens([rng.randrange(2) for _ in range(rng.randrange(1, 3 * block_size + 2))], str(number))
            if manager.can_allocate(seq):
                manager.allocate(seq)
                running.append(seq)
        elif running:
            seq = rng.choice(running)
            if seq.num_uncomputed_tokens:
                compute(manager, slots, seq, rng.randrange(1, seq.num_uncomputed_tokens + 1))
            elif rng.random() < 0.6 and manager.num_free_blocks:
                seq.token_ids.append(rng.randrange(2))
                manager.append_slot(seq)
            else:
                running.remove(seq)
                manager.free(seq)
        manager.check_integrity()
        assert_each_finds_its_own(slots, running, block_size)
    for seq in running:
        manager.free(seq)
    manager.check_integrity()
    assert manager.num_free_blocks == num_blocks
