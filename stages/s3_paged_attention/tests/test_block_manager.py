"""Blocks: which sequence holds which. Pools are drawn slot by slot: - is held, # is held and used, . is free."""

import random

import pytest

from ..block_manager import BlockManager
from ..block_pool import BlockPool
from ..observer import Observer
from ..sequence import Sequence
from .helpers import make_sequence


def pool_of(num_blocks: int, block_size: int = 4) -> BlockManager:
    return BlockManager(num_blocks, block_size, Observer())


def picture(manager: BlockManager) -> str:
    manager.check_integrity()
    return manager.report().strip(width=manager.num_blocks * manager.block_size)


def allocate(manager: BlockManager, *lengths: int) -> list[Sequence]:
    """Return a sequence for each length. It has that many tokens, and may get 50 more."""
    seqs = [make_sequence(f"{length} tokens", length, max_tokens=50) for length in lengths]
    for seq in seqs:
        manager.allocate(seq)
    return seqs


def step(manager: BlockManager, seq: Sequence) -> None:
    """Do what an engine does in a step: a slot for the last token, its keys and values, and a new token."""
    manager.append_slot(seq)
    seq.num_computed_tokens = seq.num_tokens
    seq.token_ids.append(7)


# The pool


def test_new_pool_is_taken_from_block_0():
    assert BlockPool(4).get_new_blocks(3) == [0, 1, 2]


def test_blocks_that_were_freed_last_are_taken_first():
    pool = BlockPool(6)
    pool.get_new_blocks(4)
    pool.free_blocks([1])
    pool.free_blocks([3, 0])
    assert pool.get_new_blocks(4) == [3, 0, 1, 4]


def test_too_many_blocks_are_an_error_with_both_numbers():
    pool = BlockPool(3)
    with pytest.raises(AssertionError, match="4 blocks are needed, 3 are free"):
        pool.get_new_blocks(4)
    assert pool.get_new_blocks(3) == [0, 1, 2]


# Block tables


@pytest.mark.parametrize("num_tokens, num_blocks", [(1, 1), (3, 1), (4, 1), (5, 2), (8, 2), (9, 3)])
def test_sequence_holds_the_blocks_that_its_tokens_fill(num_tokens, num_blocks):
    (seq,) = allocate(pool_of(4), num_tokens)
    assert len(seq.block_table) == num_blocks


def test_future_tokens_take_no_blocks():
    manager = pool_of(4)
    manager.allocate(make_sequence("a", 2, max_tokens=1000))
    assert picture(manager) == "----............"


def test_any_free_block_serves():
    """Of 12 free slots no 8 lie in a row."""
    manager = pool_of(6)
    seqs = allocate(manager, 3, 4, 1, 4, 2, 4)
    for seq in seqs[::2]:
        manager.free(seq)
    assert picture(manager) == "....----....----....----"
    (late,) = allocate(manager, 12)
    assert picture(manager) == "-" * 24 and sorted(late.block_table) == [0, 2, 4]


def test_next_token_takes_a_block_exactly_when_all_others_are_full():
    manager = pool_of(3)
    (seq,) = allocate(manager, 3)
    sizes = []
    for _ in range(8):
        step(manager, seq)
        sizes.append(len(seq.block_table))
    assert sizes == [1, 1, 2, 2, 2, 2, 3, 3], "with 3, 4, 5 ... 10 tokens"
    assert picture(manager) == "##########--"


def test_block_of_one_slot_wastes_nothing():
    manager = pool_of(6, block_size=1)
    a, b = allocate(manager, 3, 1)
    for seq in (a, b, a):
        step(manager, seq)
    assert picture(manager) == "#####." and a.block_table == [0, 1, 2, 4]


def test_free_returns_all_blocks_of_a_sequence():
    manager = pool_of(4)
    a, b = allocate(manager, 8, 5)
    manager.free(a)
    assert a.block_table == [] and picture(manager) == "........--------"
    manager.free(b)
    assert picture(manager) == "." * 16


# Promises


def test_sequence_is_promised_the_blocks_of_its_longest_text():
    manager = pool_of(4)
    seq = make_sequence("a", 3, max_tokens=6)
    assert manager.can_promise(seq) and not manager.can_promise(make_sequence("b", 3, max_tokens=14))
    manager.allocate(seq)
    assert (manager.num_promised(seq), manager.num_unpromised_blocks) == (3, 1)
    assert manager.can_promise(make_sequence("c", 3, max_tokens=1))
    assert not manager.can_promise(make_sequence("d", 3, max_tokens=2)), "3 blocks are free, 2 of them are promised"
    manager.free(seq)
    assert manager.num_unpromised_blocks == 4


# The report


def test_report_counts_slots():
    manager = pool_of(5)
    a, b = make_sequence("a", 6, max_tokens=3), make_sequence("b", 2, max_tokens=2)
    for seq in (a, b):
        manager.allocate(seq)
    a.num_computed_tokens, b.num_computed_tokens = 5, 2
    report = manager.report()
    assert picture(manager) == "#####---##--........"
    assert (report.num_slots, report.promised, report.held, report.used, report.wasted) == (20, 16, 12, 7, 5)


def test_peak_is_the_report_with_the_most_slots_held():
    manager = pool_of(5)
    a, b = allocate(manager, 8, 4)
    a.num_computed_tokens = 5
    full = manager.report()
    manager.free(a)
    allocate(manager, 3)
    assert manager.peak == full
    manager.free(b)
    assert manager.peak == full


def test_integrity_check_finds_a_block_in_two_places():
    manager = pool_of(4)
    a, b = allocate(manager, 4, 4)
    b.block_table = a.block_table
    with pytest.raises(AssertionError, match="a block is in two places, or in none"):
        manager.check_integrity()


# Random histories


@pytest.mark.parametrize("seed", range(10))
def test_random_history_keeps_each_block_in_one_place(seed):
    """Sequences that are promised their blocks grow to their end, in any order: they are never too few."""
    rng = random.Random(seed)
    manager = pool_of(rng.choice([3, 12]), block_size=rng.choice([1, 4]))
    held: list[Sequence] = []
    for i in range(300):
        new = make_sequence(str(i), rng.randint(1, 9), max_tokens=rng.randint(1, 9))
        if rng.random() < 0.2 and manager.can_promise(new):
            manager.allocate(new)
            held.append(new)
        elif held:
            seq = rng.choice(held)
            step(manager, seq)
            if seq.num_tokens == seq.max_num_tokens:
                manager.free(seq)
                held.remove(seq)
        manager.check_integrity()
        assert manager.report().used == sum(seq.num_computed_tokens for seq in held)
        assert manager.num_unpromised_blocks <= len(manager.pool.free)
