"""Block tables, and the pool under them. Pools are drawn slot by slot: - is held, # is held and used, . is free."""

import random
import re

import pytest

from ..block_manager import BlockManager
from ..block_pool import BlockPool
from ..observer import Observer
from ..sequence import Sequence
from .helpers import make_sequence


class Recorder(Observer):
    """An observer that keeps every event, with a sequence's request_id in its place."""

    def __init__(self) -> None:
        self.events: list[tuple[object, ...]] = []

    def tell(self, kind: str, *details: object) -> None:
        self.events.append((kind, *(getattr(detail, "request_id", detail) for detail in details)))


def pool_of(num_blocks: int, block_size: int = 4, observer: Observer | None = None) -> BlockManager:
    return BlockManager(num_blocks, block_size, observer or Observer())


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
    """Play a step of the engine: a slot for the last token, its keys and values, and a new token."""
    manager.append_slot(seq)
    seq.num_computed_tokens = seq.num_tokens
    seq.token_ids.append(7)


# The pool


def test_new_pool_hands_out_block_0_first():
    blocks = BlockPool(4).get_new_blocks(3)
    assert blocks == [0, 1, 2], "in a new pool block 0 is on top of the stack, then 1, then 2"


def test_pool_hands_out_the_last_freed_block_first():
    pool = BlockPool(6)
    pool.get_new_blocks(4)
    pool.free_blocks([1])
    pool.free_blocks([3, 0])
    blocks = pool.get_new_blocks(4)
    assert blocks == [3, 0, 1, 4], "0 to 3 were taken, 1 came back, then [3, 0]: now 3 is on top, then 0, 1, 4"


def test_pool_refuses_more_blocks_than_it_has():
    """3 of 8 blocks are free, and 4 are asked for: it raises AssertionError with both numbers, and still has the 3."""
    pool = BlockPool(8)
    pool.get_new_blocks(5)
    with pytest.raises(AssertionError) as refused:
        pool.get_new_blocks(4)
    assert {"3", "4"} <= set(re.findall(r"\d+", str(refused.value))), "the error names 4 blocks asked for, and 3 free"
    assert pool.get_new_blocks(3) == [5, 6, 7], "a refusal takes nothing, so all 3 blocks are still there"


# Block tables


@pytest.mark.parametrize("num_tokens, num_blocks", [(1, 1), (3, 1), (4, 1), (5, 2), (8, 2), (9, 3)])
def test_sequence_holds_as_many_blocks_as_its_tokens_fill(num_tokens, num_blocks):
    """The tokens that it may still get do not count."""
    (seq,) = allocate(pool_of(4), num_tokens)
    held = len(seq.block_table)
    assert held == num_blocks, f"in blocks of 4 slots, a prompt of length {num_tokens} fills {num_blocks}"


def test_future_tokens_take_no_blocks():
    manager = pool_of(4)
    manager.allocate(make_sequence("a", 2, max_tokens=1000))
    assert picture(manager) == "----............", "a prompt of 2 tokens holds one block, whatever max_tokens is"


def test_any_free_block_serves():
    """No 8 of the 12 free slots lie in a row."""
    manager = pool_of(6)
    seqs = allocate(manager, 3, 4, 1, 4, 2, 4)
    for seq in seqs[::2]:
        manager.free(seq)
    assert picture(manager) == "....----....----....----", "three sequences of six were freed"
    (late,) = allocate(manager, 12)
    assert sorted(late.block_table) == [0, 2, 4], "12 tokens fill the three blocks that are free"
    assert picture(manager) == "-" * 24, "now every block is held"


@pytest.mark.parametrize("prompt_length", [3, 4, 5])
def test_sequence_takes_a_block_exactly_when_its_blocks_are_full(prompt_length):
    manager = pool_of(3)
    (seq,) = allocate(manager, prompt_length)
    for length, num_blocks in ((3, 1), (4, 1), (5, 2), (6, 2), (7, 2), (8, 2), (9, 3), (10, 3))[prompt_length - 3 :]:
        step(manager, seq)
        held = len(seq.block_table)
        assert held == num_blocks, f"in blocks of 4 slots, a sequence of length {length} holds {num_blocks}"
    assert picture(manager) == "##########--", "10 tokens are computed, in 3 blocks"


def test_block_of_one_slot_wastes_nothing():
    manager = pool_of(6, block_size=1)
    a, b = allocate(manager, 3, 1)
    for seq in (a, b, a):
        step(manager, seq)
    assert a.block_table == [0, 1, 2, 4], "the block for a's 4th token goes to the end of its table"
    assert picture(manager) == "#####.", "5 tokens are computed, in 5 blocks"


def test_free_returns_all_blocks_of_a_sequence():
    manager = pool_of(4)
    a, b = allocate(manager, 8, 5)
    manager.free(a)
    assert a.block_table == [], "a sequence that was freed has an empty table"
    assert picture(manager) == "........--------", "a's two blocks are free, b's two are held"
    manager.free(b)
    assert picture(manager) == "." * 16, "all blocks are free"
    assert manager.report().promised == 0, "both are freed, and report() still counts blocks that were promised to them"


# Events


def test_observer_hears_which_blocks_were_freed():
    recorder = Recorder()
    manager = pool_of(4, observer=recorder)
    _, seq = allocate(manager, 8, 5)
    manager.free(seq)
    assert recorder.events == [("free", "5 tokens", [2, 3])], 'free() ends with tell("free", seq, blocks)'


def test_observer_hears_of_each_block_that_a_sequence_grows_by():
    recorder = Recorder()
    manager = pool_of(4, observer=recorder)
    (seq,) = allocate(manager, 3)
    for _ in range(7):
        step(manager, seq)
    assert recorder.events == [("grow", "3 tokens")] * 2, 'tell("grow", seq) for the 5th token and the 9th'


# Promises


def accepted(manager: BlockManager, *seqs: Sequence) -> list[str]:
    return [seq.request_id for seq in seqs if manager.can_promise(seq)]


def test_sequence_is_promised_blocks_for_its_maximum_length():
    manager = pool_of(4)
    a, b = make_sequence("a", 3, max_tokens=6), make_sequence("b", 3, max_tokens=14)
    assert accepted(manager, a, b) == ["a"], "of 4 free blocks, a may need 3 (for 9 tokens), b 5 (for 17)"
    manager.allocate(a)
    assert (manager.num_promised(a), manager.num_unpromised_blocks) == (3, 1), "a is promised 3 of 4 blocks"
    c, d = make_sequence("c", 3, max_tokens=1), make_sequence("d", 3, max_tokens=2)
    assert accepted(manager, c, d) == ["c"], "c may need 1 block, d 2; 3 are free, but 2 of them are promised to a"
    manager.free(a)
    assert manager.num_unpromised_blocks == 4, "with a gone, nothing is promised"


# The report


def test_report_counts_slots():
    manager = pool_of(5)
    a, b = make_sequence("a", 6, max_tokens=3), make_sequence("b", 2, max_tokens=2)
    for seq in (a, b):
        manager.allocate(seq)
    a.num_computed_tokens, b.num_computed_tokens = 5, 2
    report = manager.report()
    assert picture(manager) == "#####---##--........", "a holds 2 blocks and has computed 5 tokens, b 1 block and 2"
    counted = (report.num_slots, report.promised, report.held, report.used, report.wasted)
    assert counted == (20, 16, 12, 7, 5), "of 20 slots 16 are promised and 12 held, of which 7 are used and 5 wasted"


def test_peak_is_the_report_with_the_most_slots_held():
    manager = pool_of(5)
    a, b = allocate(manager, 8, 4)
    a.num_computed_tokens = 5
    full = manager.report()
    manager.free(a)
    allocate(manager, 3)
    assert manager.peak.pieces == full.pieces, "3 blocks were held before a was freed, and never more since"
    manager.free(b)
    assert manager.peak == full, "3 blocks were held before a was freed, and never more since"


def test_integrity_check_finds_a_block_in_two_places():
    manager = pool_of(4)
    a, b = allocate(manager, 4, 4)
    b.block_table = a.block_table
    with pytest.raises(AssertionError, match=r"two places or in none: free \[2, 3\], in tables \[0, 0\]"):
        manager.check_integrity()


# Random histories


@pytest.mark.parametrize("seed", range(10))
def test_random_history_keeps_each_block_in_one_place(seed):
    """Sequences that were promised their blocks grow to their maximum length, in any order, and never run out."""
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
        computed = sum(seq.num_computed_tokens for seq in held)
        assert manager.report().used == computed, "a computed token is in a slot that no block has"
        assert manager.num_unpromised_blocks <= len(manager.pool.free), "a block is held that was never promised"
