"""Block hashes, the queue of free blocks, and hits: the pool and the manager without an engine.

Blocks have 4 slots. A new pool is taken from the front: 0, 1, 2, ...
"""

import random
from collections.abc import Callable

import pytest

from ...engine.block_manager import BlockManager
from ...engine.block_pool import BlockPool, NoFreeBlocks
from ...engine.observer import Observer
from ...engine.prefix_cache import BlockHash, extend_block_hashes, hash_block_tokens, root_hash
from ...engine.sequence import Sequence
from ..testing.sequences import admit, fits, make_manager, make_sequence

TEXT = list(range(10, 26))  # four blocks


def hashes_of(token_ids: list[int], block_size: int = 2) -> list[BlockHash]:
    hashes: list[BlockHash] = []
    extend_block_hashes(hashes, token_ids, block_size)
    return hashes


# The hash chain


def test_hashes_of_a_text_form_a_chain_over_its_full_blocks():
    first = hash_block_tokens(b"", [1, 2])
    assert hashes_of([1, 2, 3, 4, 5]) == [first, hash_block_tokens(first, [3, 4])]
    assert hashes_of([1, 2, 3, 4]) == hashes_of([1, 2, 3, 4, 5])
    assert hashes_of([1]) == hashes_of([]) == []


def test_equal_tokens_have_equal_hashes_only_after_the_same_prefix():
    text, other = hashes_of([1, 2, 7, 7]), hashes_of([1, 3, 7, 7])
    assert text == hashes_of([1, 2, 7, 7])
    assert len({*text, *other}) == 4, "7, 7 after 1, 2 differs from 7, 7 after 1, 3"
    twice = hashes_of([7, 7, 7, 7])
    assert twice[0] != twice[1], "and from 7, 7 after itself"


def test_hash_depends_on_token_ids_and_not_on_their_digits():
    assert len({hash_block_tokens(b"", ids) for ids in ([1, 23], [12, 3], [123], [3, 12], [1 << 31, 0], [0, 1])}) == 6
    assert all(len(each) == 16 for each in hashes_of(TEXT))


def test_texts_with_different_salts_share_no_hash():
    def salted(salt: str | None) -> list[BlockHash]:
        hashes: list[BlockHash] = []
        extend_block_hashes(hashes, TEXT, 4, root_hash(salt))
        return hashes

    assert salted("a") == salted("a") and salted(None) == hashes_of(TEXT, 4)
    assert len({each for salt in (None, "a", "b", "\ud800") for each in salted(salt)}) == 4 * 4


def test_salt_that_spells_the_tokens_of_a_block_is_not_their_hash():
    block = [ord("a"), ord("b")]
    spelled = "".join(f"{chr(token)}{chr(0) * 7}" for token in block)
    assert root_hash(spelled) != hash_block_tokens(b"", block)


# The queue of free blocks


def queue(pool: BlockPool) -> list[int]:
    """Return the free blocks, front first."""
    return list(pool.free)


def cached_pool(num_blocks: int, *texts: int) -> BlockPool:
    """Return a pool in which these blocks are cached, each with its own text, and all blocks are free."""
    pool = BlockPool(num_blocks, Observer())
    blocks = pool.get_new_blocks(num_blocks)
    for block in texts:
        pool.cache_block(block, name(block))
    pool.free_blocks(blocks)
    return pool


def name(block: int) -> BlockHash:
    return b"text of %d" % block


def test_freed_block_returns_to_the_front_or_to_the_back_if_cached():
    pool = BlockPool(6, Observer())
    table = pool.get_new_blocks(4)
    pool.cache_block(table[1], b"a text")
    assert queue(pool) == [4, 5]
    pool.free_blocks(table)
    assert queue(pool) == [0, 2, 3, 4, 5, 1]
    pool.check_integrity([])


def test_end_of_a_text_is_taken_before_its_beginning():
    pool = cached_pool(6, 0, 1, 2)
    assert queue(pool) == [3, 4, 5, 2, 1, 0]
    assert pool.get_new_blocks(4) == [3, 4, 5, 2]
    assert [pool.cached.get(name(block)) for block in range(3)] == [0, 1, None]


def test_least_recently_used_text_is_taken_first():
    pool = cached_pool(3, 0, 1, 2)
    pool.touch([2])
    pool.free_blocks([2])  # used again
    assert queue(pool) == [1, 0, 2]
    assert pool.get_new_blocks(2) == [1, 0]
    assert pool.cached.get(name(2)) == 2


def test_hit_leaves_the_middle_of_the_queue():
    pool = cached_pool(5, 0, 1, 2)
    pool.touch([1])
    assert queue(pool) == [3, 4, 2, 0]
    assert (len(pool.free), pool.ref_counts) == (4, [0, 1, 0, 0, 0])
    pool.touch([1])
    assert (len(pool.free), pool.ref_counts) == (4, [0, 2, 0, 0, 0])
    pool.check_integrity([1, 1])
    pool.free_blocks([1])
    assert queue(pool) == [3, 4, 2, 0], "one sequence still holds it"
    pool.free_blocks([1])
    assert queue(pool) == [3, 4, 2, 0, 1]


def test_taken_block_forgets_its_text_and_may_get_another():
    pool = cached_pool(1, 0)
    [block] = pool.get_new_blocks(1)
    assert pool.cached.get(name(0)) is None
    pool.cache_block(block, b"another")
    pool.free_blocks([block])
    assert (pool.cached.get(b"another"), pool.cached.get(name(0))) == (block, None)
    pool.check_integrity([])


def test_free_block_without_a_text_cannot_be_hit():
    pool = cached_pool(2, 0)
    with pytest.raises(AssertionError, match="block 1 is neither held nor cached"):
        pool.touch([1])


def test_first_of_two_blocks_with_one_text_stays_cached():
    pool = BlockPool(3, Observer())
    first, second = pool.get_new_blocks(2)
    pool.cache_block(first, b"a text")
    pool.cache_block(second, b"a text")
    assert pool.cached.get(b"a text") == first
    pool.free_blocks([second])
    assert queue(pool) == [second, 2], "the second one is no longer useful"
    pool.free_blocks([first])
    assert queue(pool) == [second, 2, first]
    pool.check_integrity([])


# Lookups


def manager_of(num_blocks: int, block_size: int = 4) -> BlockManager:
    return make_manager(num_blocks, block_size, is_caching=True)


def with_tokens(token_ids: list[int], request_id: str = "a") -> Sequence:
    seq = make_sequence(request_id, len(token_ids), max_tokens=50)
    seq.token_ids = list(token_ids)
    return seq


def hits(manager: BlockManager, token_ids: list[int]) -> int:
    """Return how many tokens of this prompt would be hit. Change nothing."""
    return len(manager.find_hits(with_tokens(token_ids))) * manager.block_size


def compute(manager: BlockManager, seq: Sequence, num_tokens: int | None = None) -> None:
    """Compute this many tokens of a sequence, or all that are left."""
    num_tokens = seq.num_uncomputed_tokens if num_tokens is None else num_tokens
    seq.num_computed_tokens += num_tokens
    manager.cache_blocks(seq, num_tokens)


def held(manager: BlockManager, token_ids: list[int], request_id: str = "a") -> Sequence:
    """Return a sequence that holds its blocks and has computed all its tokens."""
    seq = with_tokens(token_ids, request_id)
    admit(manager, seq)
    compute(manager, seq)
    return seq


def left(manager: BlockManager, token_ids: list[int]) -> None:
    """Run this sequence from its arrival to its end."""
    manager.free(held(manager, token_ids))
    manager.check_integrity()


def test_computed_text_is_hit_in_whole_blocks():
    manager = manager_of(8)
    left(manager, TEXT[:11])  # two full blocks and three tokens
    assert hits(manager, TEXT) == 8
    assert hits(manager, TEXT[:9]) == 8
    assert hits(manager, [*TEXT[:6], 99, 99, 99, 99]) == 4
    assert hits(manager, [99, *TEXT[1:]]) == 0


@pytest.mark.parametrize("num_tokens, hit_tokens", [(1, 0), (4, 0), (5, 4), (8, 4), (9, 8), (16, 12)])
def test_last_token_is_always_computed(num_tokens, hit_tokens):
    manager = manager_of(8)
    held(manager, TEXT)
    assert hits(manager, TEXT[:num_tokens]) == hit_tokens == (num_tokens - 1) // 4 * 4


def test_equal_tokens_after_different_prefixes_are_not_hit():
    manager = manager_of(8)
    held(manager, [1, 1, 1, 1, 5, 5, 5, 5])
    held(manager, [2, 2, 2, 2, 6, 6, 6, 6], "b")
    assert hits(manager, [5, 5, 5, 5, 9]) == 0
    assert hits(manager, [3, 3, 3, 3, 5, 5, 5, 5, 9]) == 0
    assert hits(manager, [1, 1, 1, 1, 6, 6, 6, 6, 9]) == 4, "6, 6, 6, 6 was computed after 2, 2, 2, 2"


def test_output_is_hit_like_a_prompt():
    manager = manager_of(8)
    seq = held(manager, TEXT[:6])
    for token_id in TEXT[6:12]:
        seq.token_ids.append(token_id)
        manager.append_slot(seq)
        compute(manager, seq)
    manager.free(seq)
    assert hits(manager, TEXT) == 12


@pytest.mark.parametrize("chunks", [[7, 1, 8], [1] * 16, [3, 5, 8], [16]])
def test_only_computed_blocks_are_hit_whatever_the_chunks(chunks):
    manager = manager_of(8)
    seq = with_tokens(TEXT)
    admit(manager, seq)
    assert hits(manager, [*TEXT, 1]) == 0, "its blocks are allocated, but nothing is written to them"
    for num_tokens in chunks:
        compute(manager, seq, num_tokens)
        assert hits(manager, [*TEXT, 1]) == seq.num_computed_tokens // 4 * 4
        manager.check_integrity()


def test_without_caching_nothing_is_hashed_and_blocks_are_reused_last_in_first_out():
    manager = make_manager(8, 4)
    seq = held(manager, TEXT)
    manager.free(seq)
    manager.check_integrity()
    assert seq.block_hashes == [] and hits(manager, TEXT) == 0
    again = held(manager, TEXT)
    assert again.block_table == [0, 1, 2, 3]


# Admission


def test_hit_shares_the_same_blocks_and_the_rest_is_computed():
    manager = manager_of(8)
    first = held(manager, TEXT[:8])
    second = with_tokens([*TEXT[:8], 99], "b")
    admit(manager, second)
    assert second.block_table == [*first.block_table, 2] and second.num_computed_tokens == 8
    assert manager.pool.ref_counts[:3] == [2, 2, 1]
    manager.check_integrity()


def test_sequences_of_one_step_hold_their_own_blocks_and_the_next_hits_the_first():
    manager = manager_of(8)
    seqs = [with_tokens(TEXT[:8], request_id) for request_id in "ab"]
    for seq in seqs:
        admit(manager, seq)
    for seq in seqs:
        compute(manager, seq)
    late = with_tokens(TEXT[:9], "c")
    admit(manager, late)
    assert seqs[1].block_table == [2, 3] and late.block_table[:2] == seqs[0].block_table == [0, 1]
    manager.check_integrity()


def test_rest_of_a_prompt_does_not_evict_its_own_hits():
    manager = manager_of(3)
    left(manager, TEXT[:8])  # blocks 0 and 1 are cached and 2 is not: the queue is 2, 1, 0
    left(manager, [50] * 4)  # now 2 is cached too, behind 1 and 0
    seq = with_tokens(TEXT[:12])
    admit(manager, seq)
    assert seq.block_table == [0, 1, 2] and seq.num_computed_tokens == 8
    manager.check_integrity()


@pytest.mark.parametrize("num_blocks, can", [(4, True), (3, False)])
def test_hit_without_holders_counts_as_a_needed_block(num_blocks, can):
    manager = manager_of(num_blocks)
    left(manager, TEXT[:8])
    admit(manager, with_tokens([50] * 2, "b"))
    seq = with_tokens(TEXT[:12])  # two blocks from the end of the queue, and one from its front
    assert (fits(manager, seq), fits(manager, seq, spare=1)) == (can, False)
    if not can:
        with pytest.raises(NoFreeBlocks, match="1 blocks are needed, 0 are free"):
            admit(manager, seq)
        assert (manager.num_free_blocks, hits(manager, TEXT)) == (2, 8)
        assert seq.block_table == [] and seq.num_computed_tokens == 0
        assert manager.prefix_cache_stats.queries == 8 + 2, "not that of the sequence that was not admitted"
        manager.check_integrity()


def test_hit_with_a_holder_needs_no_room():
    manager = manager_of(3)
    held(manager, TEXT[:8])
    seq = with_tokens(TEXT[:12], "b")
    assert (fits(manager, seq), fits(manager, seq, spare=1)) == (True, False)
    admit(manager, seq)
    assert manager.num_free_blocks == 0
    manager.check_integrity()


# Statistics and reset


def test_reset_empties_the_cache_and_keeps_its_counts():
    manager = manager_of(8)
    left(manager, TEXT)
    before = queue(manager.pool)
    assert manager.reset_prefix_cache() is True
    assert hits(manager, TEXT) == 0 and queue(manager.pool) == before
    stats = manager.prefix_cache_stats
    assert (stats.queries, stats.hits) == (16, 0)
    manager.check_integrity()
    left(manager, TEXT)
    assert hits(manager, TEXT) == 12


def test_reset_while_a_sequence_holds_blocks_changes_nothing():
    manager = manager_of(8)
    held(manager, TEXT[:8])
    assert manager.reset_prefix_cache() is False
    assert hits(manager, TEXT) == 8 and manager.prefix_cache_stats.queries == 8


# check_integrity()


def lose_a_block(pool: BlockPool) -> None:
    pool.free.popitem()


def know_a_text_without_its_block(pool: BlockPool) -> None:
    pool.hashes.popitem()


def know_a_block_without_its_text(pool: BlockPool) -> None:
    pool.cached.popitem()


def know_a_block_that_is_to_be_taken_first(pool: BlockPool) -> None:
    pool.cache_block(next(iter(pool.free)), b"x")


def know_a_text_as_two_blocks(pool: BlockPool) -> None:
    pool.hashes[5] = next(iter(pool.cached))


def hold_a_free_block(pool: BlockPool) -> None:
    pool.ref_counts[next(reversed(pool.free))] += 1


SPOILS: list[Callable[[BlockPool], None]] = [
    lose_a_block,
    know_a_text_without_its_block,
    know_a_block_without_its_text,
    know_a_block_that_is_to_be_taken_first,
    know_a_text_as_two_blocks,
    hold_a_free_block,
]


@pytest.mark.parametrize("spoil", SPOILS)
def test_check_integrity_notices(spoil):
    manager = manager_of(8)
    left(manager, TEXT[:8])
    manager.check_integrity()
    spoil(manager.pool)
    with pytest.raises(AssertionError):
        manager.check_integrity()


# Random histories


class World:
    """A manager, and a model of its pool: for each slot, the text up to the token in it."""

    def __init__(self, rng: random.Random) -> None:
        self.rng, self.block_size, self.num_blocks = rng, rng.choice([1, 2, 3, 4]), rng.randrange(3, 20)
        self.manager = manager_of(self.num_blocks, self.block_size)
        self.slots: dict[tuple[int, int], list[int]] = {}  # by block and offset
        self.running: list[Sequence] = []
        self.num_hits = 0  # blocks

    def arrive(self) -> None:
        most = 3 * self.block_size
        own = [self.rng.randrange(2) for _ in range(self.rng.randrange(1, self.block_size + 2))]
        seq = with_tokens(TEXT[: self.rng.randrange(most)] + own, str(self.rng.random()))
        if fits(self.manager, seq):
            admit(self.manager, seq)
            self.num_hits += seq.num_computed_tokens // self.block_size
            self.running.append(seq)

    def fork(self, parent: Sequence) -> None:
        child = with_tokens(parent.token_ids, str(self.rng.random()))
        self.manager.fork(parent, child)
        self.running.append(child)

    def compute(self, seq: Sequence, num_tokens: int) -> None:
        for position in range(seq.num_computed_tokens, seq.num_computed_tokens + num_tokens):
            block = seq.block_table[position // self.block_size]
            assert self.manager.pool.ref_counts[block] == 1, "a writer holds its block alone"
            assert block not in self.manager.pool.hashes, "a cached block is never written"
            self.slots[block, position % self.block_size] = seq.token_ids[: position + 1]
        compute(self.manager, seq, num_tokens)

    def go_on(self, seq: Sequence) -> None:
        """Compute some tokens, or the one that was just sampled. Fork if only one is left."""
        if seq.num_uncomputed_tokens == 0:
            seq.token_ids.append(self.rng.randrange(2))
        elif seq.num_uncomputed_tokens > 1:
            self.compute(seq, self.rng.randrange(1, seq.num_uncomputed_tokens))
        elif self.rng.random() < 0.3:
            self.fork(seq)
        elif self.manager.can_append(seq):
            copy = self.manager.append_slot(seq)
            if copy:
                for offset in range(self.block_size):
                    self.slots[copy.target, offset] = self.slots.get((copy.source, offset), [])
            self.compute(seq, 1)

    def leave(self, seq: Sequence) -> None:
        self.running.remove(seq)
        self.manager.free(seq)

    def check(self) -> None:
        self.manager.check_integrity()
        for seq in self.running:
            for position in range(seq.num_computed_tokens):
                place = seq.block_table[position // self.block_size], position % self.block_size
                assert self.slots[place] == seq.token_ids[: position + 1]


@pytest.mark.parametrize("seed", range(20))
def test_in_random_histories_hits_hold_what_was_computed_for_the_same_text(seed):
    rng = random.Random(seed)
    world = World(rng)
    for _ in range(200):
        if not world.running or rng.random() < 0.3:
            world.arrive()
        elif rng.random() < 0.25:
            world.leave(rng.choice(world.running))
        else:
            world.go_on(rng.choice(world.running))
        world.check()
    for seq in list(world.running):
        world.leave(seq)
    world.check()
    assert world.manager.num_free_blocks == world.num_blocks
    assert world.num_hits > 5, "this history tests too little"
