"""Slots: which sequence holds which. Pools are drawn slot by slot: - is held, # is held and used, . is free."""

import random

import pytest

from ..observer import Observer
from ..sequence import Sequence
from ..slot_manager import SlotManager
from .helpers import make_sequence


def pool_of(num_slots: int, reservation: str = "request", max_model_len: int = 8) -> SlotManager:
    return SlotManager(num_slots, reservation, max_model_len, Observer())


def picture(manager: SlotManager) -> str:
    manager.check_integrity()
    return manager.report().strip(width=manager.num_slots)


def sequence_of(size: int) -> Sequence:
    return make_sequence(f"{size} slots", size - 1, max_tokens=1)


def allocate(manager: SlotManager, *sizes: int) -> list[Sequence]:
    seqs = [sequence_of(size) for size in sizes]
    for seq in seqs:
        needed = seq.max_num_tokens
        assert manager.can_allocate(seq), f"{needed} slots in a row are free, and have no place: {picture(manager)}"
        manager.allocate(seq)
    return seqs


# How much is reserved


@pytest.mark.parametrize(
    "reservation, expected", [("request", "-----..........."), ("max_model_len", "--------........")]
)
def test_sequence_reserves_its_request_or_max_model_len(reservation, expected):
    manager = pool_of(16, reservation)
    manager.allocate(make_sequence("a", 2, max_tokens=3))
    assert picture(manager) == expected, "the slots of a prompt of 2 tokens with max_tokens=3, max_model_len is 8"


def test_equal_ranges_waste_slots_inside():
    manager = pool_of(16, "max_model_len")
    for name in "ab":
        seq = make_sequence(name, 1, max_tokens=2)
        manager.allocate(seq)
        seq.num_computed_tokens = 3
    assert picture(manager) == "###-----###-----"
    assert not manager.can_allocate(make_sequence("c", 1, max_tokens=2)), "10 slots are wasted"


def test_fitted_ranges_waste_slots_between():
    manager = pool_of(16)
    a, b, c, d, e = allocate(manager, 2, 3, 4, 2, 3)
    b.num_computed_tokens, d.num_computed_tokens = 3, 2
    for seq in (a, c, e):
        manager.free(seq)
    assert picture(manager) == "..###....##.....", "pieces of 2, 3, 4, 2 and 3 slots; only two are left"
    assert not manager.can_allocate(sequence_of(6)), "11 slots are free, but not 6 in a row"
    assert manager.can_allocate(sequence_of(5))


# First fit


def test_first_range_that_is_large_enough_is_taken():
    manager = pool_of(12)
    a, _, c, _ = allocate(manager, 4, 1, 2, 4)
    manager.free(a)
    manager.free(c)
    assert picture(manager) == "....-..----.", "pieces of 4, 1, 2 and 4 slots, without the first and the third"
    late, large = allocate(manager, 2, 2)
    expected = (range(0, 2), range(2, 4))
    assert (late.slots, large.slots) == expected, "2 slots each; best fit would take 5 and 6 first"


def test_range_that_is_too_small_is_passed_over():
    manager = pool_of(10)
    a, _ = allocate(manager, 2, 3)
    manager.free(a)
    (late,) = allocate(manager, 3)
    assert late.slots == range(5, 8), "a piece of 3 slots does not fit into the first 2"
    assert picture(manager) == "..------.."


@pytest.mark.parametrize("order", ["abc", "acb", "bac", "bca", "cab", "cba"])
def test_free_neighbors_join_in_any_order(order):
    manager = pool_of(9)
    seqs = dict(zip("abc", allocate(manager, 2, 3, 4), strict=True))
    assert not manager.can_allocate(sequence_of(1)), "all 9 slots are held"
    for name in order:
        manager.free(seqs[name])
        assert seqs[name].slots is None, "a sequence that was freed has no slots"
    assert manager.free_ranges() == [range(9)], "all 9 slots are free again, in one piece"
    assert manager.can_allocate(sequence_of(9))


def test_free_ranges_are_neither_empty_nor_split():
    manager = pool_of(10)
    assert manager.free_ranges() == [range(10)], "an empty pool of 10 slots"
    _, b, c, d = allocate(manager, 2, 2, 3, 3)
    assert manager.free_ranges() == [], "a full pool"
    manager.free(b)
    assert manager.free_ranges() == [range(2, 4)], "pieces of 2, 2, 3 and 3 slots, without the second"
    manager.free(d)
    assert manager.free_ranges() == [range(2, 4), range(7, 10)], "and without the fourth"
    manager.free(c)
    assert manager.free_ranges() == [range(2, 10)], "and without the third, which was between them"


def test_allocation_that_fails_changes_nothing():
    """4 slots are free in one piece and 2 in another, and a sequence needs 5: allocate() raises AssertionError."""
    manager = pool_of(10)
    _, b, _ = allocate(manager, 2, 4, 2)
    manager.free(b)
    late = sequence_of(5)
    with pytest.raises(AssertionError):
        manager.allocate(late)
    assert late.slots is None and picture(manager) == "--....--..", "6 slots are free, and not 5 in a row"


def test_can_allocate_takes_nothing():
    manager = pool_of(4)
    assert all(manager.can_allocate(sequence_of(4)) for _ in range(3))
    assert picture(manager) == "...."


# The report


def test_report_counts_slots():
    manager = pool_of(20, "max_model_len", max_model_len=6)
    a, b, c = (make_sequence(name, 2, max_tokens=2) for name in "abc")
    for seq in (a, b, c):
        manager.allocate(seq)
    manager.free(b)
    a.num_computed_tokens, c.num_computed_tokens = 3, 2
    report = manager.report()
    assert picture(manager) == "###---......##----.."
    assert (report.num_slots, report.promised, report.held, report.used, report.wasted) == (20, 8, 12, 5, 7)
    assert report.largest_free == 6
    assert report.strip(width=5) == "#-.#-", "a character shows what most of its slots are"


def test_peak_is_the_report_with_the_most_slots_held():
    manager = pool_of(20)
    a, b = allocate(manager, 8, 4)
    a.num_computed_tokens = 5
    full = manager.report()
    manager.free(a)
    allocate(manager, 3)
    assert manager.peak == full, "12 slots were held before 8 of them were freed"
    manager.free(b)
    assert manager.peak == full


def test_observer_hears_which_slots_were_freed():
    heard: list[tuple] = []

    class Recorder(Observer):
        def tell(self, kind: str, *details: object) -> None:
            heard.append((kind, *details))

    manager = SlotManager(10, "request", 8, Recorder())
    _, b = allocate(manager, 2, 3)
    manager.free(b)
    assert heard == [("free", b, range(2, 5))], 'tell("free", seq, slots)'


def test_integrity_check_finds_a_slot_that_is_held_twice():
    manager = pool_of(8)
    a, b = allocate(manager, 2, 2)
    a.slots = b.slots
    with pytest.raises(AssertionError, match="in no range, or in two"):
        manager.check_integrity()


# Random histories


@pytest.mark.parametrize("seed", range(10))
def test_random_history_agrees_with_a_list_of_slots(seed):
    """The model of the pool is a list with the holder of each slot."""
    rng = random.Random(seed)
    num_slots = rng.choice([1, 7, 40])
    manager, holders = pool_of(num_slots), [None] * num_slots
    held: list[Sequence] = []
    for _ in range(150):
        if held and rng.random() < 0.45:
            seq = held.pop(rng.randrange(len(held)))
            manager.free(seq)
            holders = [None if holder is seq else holder for holder in holders]
        else:
            seq = sequence_of(size := rng.randint(2, 12))
            starts = [i for i in range(num_slots) if holders[i : i + size] == [None] * size]
            assert manager.can_allocate(seq) == bool(starts), f"{size} slots, the pool is {picture(manager)}"
            if starts:
                before = picture(manager)
                manager.allocate(seq)
                assert seq.slots == range(starts[0], starts[0] + size), f"the first {size} free slots of {before}"
                holders[starts[0] : starts[0] + size] = [seq] * size
                held.append(seq)
        assert picture(manager) == "".join("." if holder is None else "-" for holder in holders)
