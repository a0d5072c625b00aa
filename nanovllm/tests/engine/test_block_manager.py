"""BlockManager: which sequence holds which blocks. In drawings of a pool, - is held, # is held and used, . is free."""

import random
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from unittest.mock import Mock, call

import pytest
import torch

from ...engine.block_manager import BlockManager, cdiv
from ...engine.block_pool import BlockPool, NoFreeBlocks
from ...engine.observer import Observer
from ...engine.sequence import Sequence
from ...tiers.host_tier import HostTier
from ..testing.sequences import admit, fits, holders, make_manager, make_sequence


def pool_of(num_blocks: int, block_size: int = 4) -> BlockManager:
    return make_manager(num_blocks, block_size)


def drawn(manager: BlockManager) -> str:
    manager.check_integrity()
    return manager.report().strip(width=manager.num_blocks * manager.block_size)


def allocate(manager: BlockManager, *lengths: int) -> list[Sequence]:
    """Allocate a sequence for each length: its tokens now, with up to 50 more to come."""
    seqs = [make_sequence(f"{length} tokens, number {i}", length, max_tokens=50) for i, length in enumerate(lengths)]
    for seq in seqs:
        admit(manager, seq)
    return seqs


def step(manager: BlockManager, seq: Sequence) -> None:
    """Run one step of an engine: a slot for the last token, its keys and values, and one more token."""
    manager.append_slot(seq)
    seq.num_computed_tokens = seq.num_tokens
    seq.token_ids.append(7)


# How many blocks


@pytest.mark.parametrize("num_tokens, num_blocks", [(1, 1), (3, 1), (4, 1), (5, 2), (8, 2), (9, 3)])
def test_prompt_takes_the_blocks_that_its_tokens_fill(num_tokens, num_blocks):
    (seq,) = allocate(pool_of(4), num_tokens)
    assert len(seq.block_table) == num_blocks


def test_future_tokens_take_no_blocks():
    manager = pool_of(4)
    admit(manager, make_sequence("a", 2, max_tokens=1000))
    assert drawn(manager) == "----............"


# Which blocks


@pytest.mark.parametrize("lengths, tables", [((2, 2, 2, 2), [[0], [3], [1], [4]]), ((2, 10), [[0], [3, 1, 4]])])
def test_last_freed_block_is_taken_first(lengths, tables):
    manager = pool_of(5)
    seqs = allocate(manager, 1, 1, 1, 1)
    for i in (1, 3, 0):
        manager.free(seqs[i])
    assert [seq.block_table for seq in allocate(manager, *lengths)] == tables


def test_too_small_pool_reports_both_numbers_and_keeps_its_order():
    pool = BlockPool(3, Observer())
    pool.free_blocks(pool.get_new_blocks(2)[::-1])
    with pytest.raises(NoFreeBlocks, match="4 blocks are needed, 3 are free"):
        pool.get_new_blocks(4)
    assert len(pool.free) == 3 and pool.get_new_blocks(0) == []
    assert pool.get_new_blocks(3) == [1, 0, 2]


# Drafts


def test_draft_takes_the_blocks_that_are_free_and_trimming_gives_them_back():
    observer = Mock(Observer)
    manager = make_manager(4, observer=observer)
    seq = admit(manager, make_sequence("a", 6, max_tokens=50))
    assert manager.append_draft_slots(seq, 2) == 2 and len(seq.block_table) == 2
    observer.tell.reset_mock()
    manager.trim(seq)
    assert observer.tell.mock_calls == [], "nothing is given back"
    assert manager.append_draft_slots(seq, 3) == 3 and len(seq.block_table) == 3
    assert manager.append_draft_slots(seq, 100) == 10 and len(seq.block_table) == 4
    observer.tell.reset_mock()
    manager.trim(seq)
    assert len(seq.block_table) == 2 and observer.tell.mock_calls == [call("trim", seq, [2, 3])]


def test_draft_evicts_nothing():
    """Of six blocks, two are cached, three are held by b, and one is free and holds nothing."""
    manager = make_manager(6, is_caching=True)
    first = admit(manager, make_sequence("a", 9, max_tokens=50))
    first.num_computed_tokens = 9
    manager.cache_blocks(first, 9)
    manager.free(first)
    seq = make_sequence("b", 12, max_tokens=50)
    seq.token_ids = [5] * 12  # no hit
    admit(manager, seq)
    assert (manager.append_draft_slots(seq, 8), len(manager.pool.cached)) == (4, 2)


# Cached tokens


@pytest.mark.parametrize("num_output_tokens, num_cached_tokens", [(0, 0), (1, 8)])
def test_lost_hits_do_not_count_before_the_first_token(num_output_tokens, num_cached_tokens):
    manager = make_manager(8, is_caching=True)
    other, seq = make_sequence("a", 9, max_tokens=50), make_sequence("b", 9, max_tokens=50)
    admit(manager, other).num_computed_tokens = 9
    manager.cache_blocks(other, 9)
    assert admit(manager, seq).num_cached_tokens == 8
    for each in (other, seq):
        manager.free(each)
    manager.reset_prefix_cache()
    seq.num_preemptions = 1
    seq.token_ids += [7] * num_output_tokens
    assert admit(manager, seq).num_cached_tokens == num_cached_tokens


# Freeing


def test_tier_hears_that_a_freed_sequence_used_its_blocks():
    """The disk's file times order its evictions."""
    tier = Mock(HostTier)
    tier.hold.return_value = []
    manager = make_manager(3, tier=tier)
    seq = make_sequence("a", 5, max_tokens=50)
    manager.allocate(seq, [])
    seq.block_hashes = [b"first"]
    manager.free(seq)
    assert tier.touch.mock_calls == [call([b"first"])]


def test_freeing_twice_is_an_error_that_changes_nothing():
    manager = pool_of(3)
    a, _ = allocate(manager, 4, 4)
    manager.free(a)
    with pytest.raises(KeyError):
        manager.free(a)
    assert drawn(manager) == "....----....", "the other sequence keeps its block"


@pytest.mark.parametrize(
    "blocks, wrong", [([1, 1], 1), ([3], 3), ([0, 1, 3], 3), ([0, 1, 2, 0], 0), ([2, 2, 2], 2)], ids=str
)
def test_block_freed_twice_is_named(blocks, wrong):
    """Blocks 0, 1 and 2 are held; 3 and 4 are free."""
    pool = BlockPool(5, Observer())
    assert pool.get_new_blocks(4) == [0, 1, 2, 3]
    pool.free_blocks([3])
    with pytest.raises(AssertionError, match=rf"block {wrong}\b"):
        pool.free_blocks(blocks)


# All or nothing


def test_failed_allocation_changes_nothing():
    manager = pool_of(4)
    a, _, _ = allocate(manager, 4, 4, 4)
    manager.free(a)
    late = make_sequence("late", 9, max_tokens=1)
    before = manager.report()
    assert not fits(manager, late)
    with pytest.raises(NoFreeBlocks, match=r"3 .* 2 "):
        admit(manager, late)
    assert manager.report() == before and late.block_table == []
    assert drawn(manager) == "....--------...."
    late.token_ids.pop()
    admit(manager, late)
    assert late.block_table == [0, 3], "the blocks are taken in the same order as before the failure"


def test_can_append_takes_nothing():
    manager = pool_of(2)
    (seq,) = allocate(manager, 4)
    seq.token_ids.append(7)
    for _ in range(3):
        assert fits(manager, make_sequence("a", 3, max_tokens=1)) and manager.can_append(seq)
    assert drawn(manager) == "----...."


def test_sequence_is_allocated_once():
    manager = pool_of(4)
    (a,) = allocate(manager, 4)
    with pytest.raises(AssertionError, match="holds blocks already"):
        admit(manager, a)
    assert drawn(manager) == "----............"


# Growing


@pytest.mark.parametrize("num_tokens", range(1, 10))
def test_next_token_takes_a_block_exactly_when_the_others_are_full(num_tokens):
    manager = pool_of(4)
    (seq,) = allocate(manager, num_tokens)
    before = manager.num_free_blocks
    seq.token_ids.append(7)
    assert manager.can_append(seq)
    manager.append_slot(seq)
    is_boundary = num_tokens % 4 == 0
    assert before - manager.num_free_blocks == is_boundary
    assert len(seq.block_table) == cdiv(num_tokens + 1, 4)
    manager.append_slot(seq)
    assert before - manager.num_free_blocks == is_boundary, "the slot is there, so no block is taken"
    manager.check_integrity()


def test_full_sequence_cannot_grow_without_a_free_block():
    manager = pool_of(2)
    a, b = allocate(manager, 4, 3)
    a.token_ids.append(7)
    before = manager.report()
    assert not manager.can_append(a)
    with pytest.raises(NoFreeBlocks, match=r"1 .* 0 "):
        manager.append_slot(a)
    assert manager.report() == before and a.block_table == [0]
    manager.free(b)
    assert manager.can_append(a)
    manager.append_slot(a)
    assert a.block_table == [0, 1]


# The report


def test_report_counts_slots():
    """Promises are whole blocks: 2 tokens and 4 more make 2 of them."""
    manager = pool_of(6)
    a, b, c = (make_sequence(name, 2, max_tokens=4) for name in "abc")
    for seq in (a, b, c):
        admit(manager, seq)
    manager.free(b)
    for _ in range(4):
        step(manager, a)
    c.num_computed_tokens = 2
    report = manager.report()
    assert drawn(manager) == "#####---##--............"
    assert (report.num_slots, report.promised, report.held, report.used) == (24, 16, 12, 7)
    assert report.pieces == ((0, 4, 4), (4, 4, 1), (8, 4, 2)), "start, size, used"


def test_peak_is_the_first_report_with_the_most_slots_held():
    manager = pool_of(6)
    assert manager.peak.held == 0
    a, b = allocate(manager, 5, 8)
    step(manager, a)
    assert (manager.peak.held, manager.peak.used) == (16, 5), "now"
    manager.free(b)
    assert (manager.peak.held, manager.peak.used) == (16, 5), "before b was freed"
    (c,) = allocate(manager, 8)
    step(manager, c)
    assert (manager.peak.held, manager.peak.used) == (16, 5), "c holds as many"
    (d,) = allocate(manager, 4)
    assert (manager.peak.held, manager.peak.used) == (20, 13)
    for seq in (a, c, d):
        manager.free(seq)
    assert (manager.peak.held, manager.peak.used) == (20, 13) and len(manager.peak.pieces) == 5


def test_work_of_a_report_does_not_grow_with_the_blocks():
    """It is made when a sequence ends while requests run."""

    def num_calls(num_tokens):
        manager, calls = pool_of(1000), 0
        seqs = allocate(manager, *[num_tokens] * 3)

        def note(frame, event, argument):
            nonlocal calls
            calls += event in ("call", "c_call")

        sys.setprofile(note)
        manager.report()
        sys.setprofile(None)
        assert len(manager.report().pieces) == len(seqs) * -(-num_tokens // 4)
        return calls

    assert num_calls(4) == num_calls(1000)


def test_peak_counts_blocks_that_a_load_holds():
    """The load of a sequence that was aborted goes on."""
    tier = HostTier(torch.zeros(8, 1), 8, Observer())
    manager = make_manager(8, is_caching=True, tier=tier)
    seq, again, other = (make_sequence(name, 17, max_tokens=1) for name in "abc")
    admit(manager, seq)
    seq.num_computed_tokens = 16
    manager.cache_blocks(seq, 16)
    manager.free(seq)
    manager.pool.free_blocks(manager.pool.get_new_blocks(8))  # evicts the cached blocks to the host
    admit(manager, again)
    manager.free(again)
    assert len(tier.arriving()) == 4 and manager.peak.held == 20
    other.token_ids = [5] * 8
    admit(manager, other)
    assert manager.num_free_blocks == 2 and (manager.peak.held, len(manager.peak.pieces)) == (24, 2)


def test_strip_shows_blocks_in_pool_order_and_the_main_state_of_each_cell():
    manager = pool_of(4)
    a, b = allocate(manager, 4, 4)
    manager.free(a)
    for _ in range(4):
        step(manager, b)
    assert b.block_table == [1, 0] and b.num_computed_tokens == 7
    assert drawn(manager) == "###-####........"
    assert manager.report().strip(width=8) == "####...." != manager.report().strip(width=4) == "##.."
    assert manager.report().strip(width=3) == "##."


# a holds blocks 0 and 1 for 6 tokens, b holds block 2 for 3; blocks 3 to 5 are free.
Spoiler = Callable[[BlockManager, Sequence, Sequence], Any]
SPOILERS: dict[str, Spoiler] = {
    "a block in two tables": lambda manager, a, b: b.block_table.__setitem__(0, 1),
    "a block twice in a table": lambda manager, a, b: a.block_table.__setitem__(1, 0),
    "a block in no table": lambda manager, a, b: a.block_table.pop(),
    "a free block in a table": lambda manager, a, b: a.block_table.__setitem__(0, 5),
    "a block that does not exist": lambda manager, a, b: a.block_table.__setitem__(0, 6),
    "a block counted from the end": lambda manager, a, b: a.block_table.__setitem__(0, -6),
    "a held block in the free queue": lambda manager, a, b: manager.pool.free.update({0: None}),
    "a free block lost": lambda manager, a, b: manager.pool.free.popitem(),
    "a block in the free queue that does not exist": lambda manager, a, b: manager.pool.free.update({6: None}),
    "a held block in the place of a free one": lambda manager, a, b: (
        manager.pool.free.update({1: None}) or manager.pool.free.pop(4)
    ),
    "a free block counted as held": lambda manager, a, b: manager.pool.ref_counts.__setitem__(4, 1),
    "a held block counted as free": lambda manager, a, b: manager.pool.ref_counts.__setitem__(1, 0),
    "a holder counted twice": lambda manager, a, b: manager.pool.ref_counts.__setitem__(1, 2),
    "a holder forgotten": lambda manager, a, b: holders(manager).remove(a),
    "a block more than the tokens need": lambda manager, a, b: b.block_table.extend(manager.pool.get_new_blocks(1)),
    "more computed than there is room for": lambda manager, a, b: setattr(a, "num_computed_tokens", 9),
}


@pytest.mark.parametrize("spoil", SPOILERS.values(), ids=SPOILERS)
def test_check_integrity_notices(spoil):
    manager = pool_of(6)
    a, b = allocate(manager, 6, 3)
    manager.check_integrity()
    spoil(manager, a, b)
    with pytest.raises(AssertionError):
        manager.check_integrity()


# No operation scans the pool


class Counting(OrderedDict):
    """A queue that counts the elements that operations look at, copy or move."""

    touched: list[int]

    def __iter__(self) -> Iterator[int]:
        for block in super().__iter__():
            self.touched.append(1)
            yield block

    def __reversed__(self) -> Iterator[int]:
        for block in super().__reversed__():
            self.touched.append(1)
            yield block

    def keys(self) -> list[int]:  # type: ignore[override]
        return list(self)

    def items(self) -> list[tuple[int, None]]:  # type: ignore[override]
        return [(block, None) for block in self]

    def popitem(self, last: bool = True) -> tuple[int, None]:
        self.touched.append(1)
        return super().popitem(last)

    def move_to_end(self, block: int, last: bool = True) -> None:
        self.touched.append(1)
        super().move_to_end(block, last)

    def __setitem__(self, block: int, value: None) -> None:
        self.touched.append(1)
        super().__setitem__(block, value)


def num_touched(num_blocks: int) -> list[int]:
    """Return how many elements of the queue each operation touches, in a pool that is one third held."""
    manager = pool_of(num_blocks)
    allocate(manager, 4 * num_blocks // 3)
    seq, other = make_sequence("a", 12, max_tokens=1), make_sequence("b", 5, max_tokens=1)
    operations: list[Callable[[], Any]] = [
        lambda: fits(manager, seq),
        lambda: admit(manager, seq),
        lambda: admit(manager, other),
        lambda: seq.token_ids.append(7),
        lambda: manager.can_append(seq),
        lambda: manager.append_slot(seq),
        lambda: manager.free(seq),
        lambda: manager.free(other),
    ]
    touched: list[int] = []
    Counting.touched = touched
    manager.pool.free = Counting(manager.pool.free)
    touched.clear()
    sums = []
    for operation in operations:
        operation()
        sums.append(sum(touched))
        touched.clear()
    manager.check_integrity()
    return sums


def test_no_operation_takes_longer_in_a_larger_pool():
    assert num_touched(100_000) == num_touched(60)
    assert sum(num_touched(60)) > 0, "nothing was counted"


SCANS: dict[str, Callable[[Any], Any]] = {
    "sorted": sorted,
    "max": max,
    "a set of it": set,
    "backwards": lambda free: [*reversed(free)],
    "keys": lambda free: free.keys(),
    "items": lambda free: free.items(),
    "a copy": lambda free: free.copy(),
}


# Random histories


@pytest.mark.parametrize("seed", range(20))
def test_random_histories_keep_every_block_in_one_place(seed):
    """Compare with a pool made of sets, which is slow but too simple to be wrong."""
    rng = random.Random(seed)
    num_blocks, block_size = rng.choice([(1, 4), (7, 1), (12, 3), (25, 4), (5, 16)])
    manager, model = pool_of(num_blocks, block_size), PoolOfSets(num_blocks, block_size)
    running: list[Sequence] = []
    for number in range(250):
        verb = rng.choice(["arrive", "arrive", "grow", "grow", "grow", "grow", "leave"])
        if verb == "arrive":
            seq = make_sequence(str(number), rng.randint(1, 3 * block_size), max_tokens=rng.randint(1, 20))
            if model.allows(partial(fits, manager), partial(admit, manager), seq):
                running.append(seq)
        elif running and verb == "grow":
            seq = rng.choice(running)
            seq.num_computed_tokens = seq.num_tokens
            seq.token_ids.append(7)
            if not model.allows(manager.can_append, manager.append_slot, seq):
                seq.token_ids.pop()
        elif running:
            seq = running.pop(rng.randrange(len(running)))
            manager.free(seq)
            model.leaves(seq)
            with pytest.raises(KeyError):
                manager.free(seq)
        model.compare(manager, running)


class PoolOfSets:
    """The free blocks, and the blocks of each request."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.free, self.held, self.block_size = set(range(num_blocks)), dict[str, set[int]](), block_size

    def allows(self, can: Callable, take: Callable, seq: Sequence) -> bool:
        """Ask for the blocks that `seq` needs. Check that it gets them, or that nothing changes."""
        mine = self.held.get(seq.request_id, set())
        num_lacking = -(-seq.num_tokens // self.block_size) - len(mine)
        is_enough = num_lacking <= len(self.free)
        assert can(seq) == is_enough
        if not is_enough:
            with pytest.raises(NoFreeBlocks, match=f"{num_lacking} .* {len(self.free)} "):
                take(seq)
            return False
        take(seq)
        new = set(seq.block_table) - mine
        assert len(new) == num_lacking and new <= self.free and mine <= set(seq.block_table)
        self.free -= new
        self.held[seq.request_id] = mine | new
        return True

    def leaves(self, seq: Sequence) -> None:
        self.free |= self.held.pop(seq.request_id)

    def compare(self, manager: BlockManager, running: list[Sequence]) -> None:
        manager.check_integrity()
        assert manager.num_free_blocks == len(self.free)
        assert {seq.request_id: set(seq.block_table) for seq in running} == self.held
        report = manager.report()
        assert report.held == self.block_size * sum(map(len, self.held.values()))
        assert report.used == sum(seq.num_computed_tokens for seq in running)
        assert report.promised == self.block_size * sum(cdiv(seq.max_num_tokens, self.block_size) for seq in running)
        assert report.strip(width=report.num_slots).count(".") == self.block_size * len(self.free)
