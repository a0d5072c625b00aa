"""Who holds which slots. Pools are drawn slot by slot: - is held, # is held and used, . is free."""

import random
from itertools import groupby

import pytest

from ..sequence import Sequence
from ..slot_manager import NoFreeSlots, SlotManager
from .helpers import make_sequence


def pool_of(num_slots: int) -> SlotManager:
    return SlotManager(num_slots, "request", max_model_len=num_slots)


def drawn(manager: SlotManager) -> str:
    manager.check_integrity()
    return manager.report().strip(width=manager.num_slots)


def allocate(manager: SlotManager, *sizes: int) -> list[Sequence]:
    """A sequence for each size: it reserves that many slots."""
    seqs = [make_sequence(f"{size} slots, number {i}", size - 1, max_tokens=1) for i, size in enumerate(sizes)]
    for seq in seqs:
        manager.allocate(seq)
    return seqs


# How much is reserved


def test_request_reserves_prompt_and_max_tokens():
    manager = SlotManager(16, "request", max_model_len=8)
    manager.allocate(make_sequence("a", 2, max_tokens=3))
    assert drawn(manager) == "-----..........."


def test_max_model_len_reserves_the_longest_for_everyone():
    manager = SlotManager(16, "max_model_len", max_model_len=8)
    manager.allocate(make_sequence("a", 2, max_tokens=3))
    assert drawn(manager) == "--------........"


def test_equal_reservations_waste_inside():
    manager = SlotManager(16, "max_model_len", max_model_len=8)
    for name in "ab":
        seq = make_sequence(name, 1, max_tokens=2)
        manager.allocate(seq)
        seq.num_computed_tokens = 3  # as far as it will ever come
    assert drawn(manager) == "###-----###-----"
    assert manager.report().wasted == 10
    assert not manager.can_allocate(make_sequence("c", 1, max_tokens=2)), "the waste would have served three more"


def test_fitted_reservations_leave_holes_outside():
    manager = pool_of(16)
    a, b, c, d, e = allocate(manager, 2, 3, 4, 2, 3)
    b.num_computed_tokens, d.num_computed_tokens = 3, 2
    for seq in (a, c, e):
        manager.free(seq)
    assert drawn(manager) == "..###....##....."
    assert manager.report().wasted == 0
    assert not manager.can_allocate(make_sequence("f", 5, max_tokens=1)), "11 slots are free, no 6 of them in a row"


# First fit


def test_pieces_are_taken_from_the_front():
    manager = pool_of(10)
    a, b = allocate(manager, 3, 4)
    assert (a.slots.start, a.slots.size) == (0, 3)
    assert (b.slots.start, b.slots.size) == (3, 4)


def test_the_first_hole_that_is_large_enough_is_taken_not_the_best():
    manager = pool_of(12)
    a, _, c, _ = allocate(manager, 4, 1, 2, 5)
    manager.free(a)
    manager.free(c)
    assert drawn(manager) == "....-..-----"
    (late,) = allocate(manager, 2)
    assert late.slots.start == 0, "the hole at 5 would have fitted exactly"


def test_a_hole_too_small_is_passed_over():
    manager = pool_of(10)
    a, _ = allocate(manager, 2, 3)
    manager.free(a)
    (late,) = allocate(manager, 3)
    assert late.slots.start == 5
    assert drawn(manager) == "..------.."


def test_the_whole_pool_can_be_one_piece():
    manager = pool_of(6)
    (a,) = allocate(manager, 6)
    assert drawn(manager) == "------"
    assert not manager.can_allocate(make_sequence("b", 1, max_tokens=1))
    manager.free(a)
    assert drawn(manager) == "......"


# Giving back


@pytest.mark.parametrize("order", ["abc", "acb", "bac", "bca", "cab", "cba"])
def test_free_neighbours_join_in_any_order(order):
    manager = pool_of(9)
    seqs = dict(zip("abc", allocate(manager, 2, 3, 4), strict=True))
    for name in order:
        manager.free(seqs[name])
        manager.check_integrity()
    assert manager.can_allocate(make_sequence("all", 8, max_tokens=1))
    assert manager.report().holes == 0


def test_a_sequence_that_gave_its_slots_back_names_none():
    manager = pool_of(4)
    (a,) = allocate(manager, 4)
    manager.free(a)
    assert a.slots is None


def test_freeing_twice_is_an_error_and_changes_nothing():
    manager = pool_of(6)
    a, _ = allocate(manager, 2, 2)
    manager.free(a)
    with pytest.raises(ValueError, match="holds no slots"):
        manager.free(a)
    assert drawn(manager) == "..--.."


def test_freeing_what_was_never_allocated_is_an_error():
    manager = pool_of(6)
    (a,) = allocate(manager, 2)
    stranger = make_sequence(a.request_id, 1, max_tokens=1)  # another sequence, though it has the same name
    with pytest.raises(ValueError, match="holds no slots"):
        manager.free(stranger)
    assert drawn(manager) == "--...."
    manager.free(a)


# All or nothing


def test_an_allocation_that_fails_changes_nothing():
    manager = pool_of(9)
    a, _, _ = allocate(manager, 3, 3, 3)
    manager.free(a)
    late = make_sequence("late", 3, max_tokens=1)
    before = manager.report()
    assert not manager.can_allocate(late)
    with pytest.raises(NoFreeSlots, match="4 slots in one piece are needed, the largest free one has 3"):
        manager.allocate(late)
    assert manager.report() == before and late.slots is None
    manager.check_integrity()


def test_free_slots_that_are_not_in_one_piece_do_not_help():
    manager = pool_of(8)
    a, _, c, _ = allocate(manager, 2, 2, 2, 2)
    manager.free(a)
    manager.free(c)
    assert not manager.can_allocate(make_sequence("late", 2, max_tokens=1)), "4 are free, but no 3 in a row"
    assert manager.can_allocate(make_sequence("small", 1, max_tokens=1))


def test_asking_takes_nothing():
    manager = pool_of(4)
    for _ in range(3):
        assert manager.can_allocate(make_sequence("a", 3, max_tokens=1))
    assert drawn(manager) == "...."


# Growing


def test_a_sequence_grows_into_its_own_piece_and_no_further():
    manager = pool_of(8)
    seq = make_sequence("a", 2, max_tokens=2)
    manager.allocate(seq)
    for _ in range(2):
        manager.append_slot(seq)
        seq.token_ids.append(7)
    assert manager.can_append(seq) and drawn(manager) == "----....", "growing takes nothing: it was reserved"
    seq.token_ids.append(7)
    assert not manager.can_append(seq)


# The report


def test_the_report_counts_slots():
    manager = SlotManager(20, "max_model_len", max_model_len=6)
    a, b, c = (make_sequence(name, 2, max_tokens=2) for name in "abc")
    for seq in (a, b, c):
        manager.allocate(seq)
    manager.free(b)
    a.num_computed_tokens, c.num_computed_tokens = 3, 2
    report = manager.report()
    assert drawn(manager) == "###---......##----.."
    assert (report.num_slots, report.promised, report.held, report.used, report.wasted) == (20, 8, 12, 5, 7)
    assert (report.largest_free, report.holes) == (6, 1), "what is free behind everybody is no hole"


def test_a_strip_shows_what_most_of_each_cell_is():
    manager = pool_of(12)
    (a,) = allocate(manager, 8)
    a.num_computed_tokens = 3
    assert drawn(manager) == "###-----...."
    assert manager.report().strip(width=3) == "#-."


def test_the_check_notices_a_slot_in_two_places():
    manager = pool_of(8)
    a, b = allocate(manager, 2, 2)
    a.slots = b.slots
    with pytest.raises(AssertionError):
        manager.check_integrity()


# Any history


@pytest.mark.parametrize("seed", range(20))
def test_any_history_leaves_every_slot_in_one_place(seed):
    """Against a pool kept as a row of names, one a slot: slow, and too simple to be wrong."""
    rng = random.Random(seed)
    num_slots = rng.choice([1, 7, 40])
    manager, slots = pool_of(num_slots), [None] * num_slots
    held: list[Sequence] = []
    for step in range(150):
        if held and rng.random() < 0.45:
            seq = held.pop(rng.randrange(len(held)))
            manager.free(seq)
            slots = [None if name == seq.request_id else name for name in slots]
        else:
            seq = make_sequence(str(step), rng.randint(1, 12), max_tokens=1)
            size = seq.max_num_tokens
            fits = [i for i in range(num_slots) if slots[i : i + size] == [None] * size]
            assert manager.can_allocate(seq) == bool(fits)
            if fits:
                manager.allocate(seq)
                assert tuple(seq.slots) == (fits[0], size)
                slots[fits[0] : fits[0] + size] = [seq.request_id] * size
                held.append(seq)
        manager.check_integrity()
        free_runs = [len(list(run)) for name, run in groupby(slots) if name is None]
        report, num_behind = manager.report(), int(slots[-1] is None)
        assert (report.holes, report.largest_free) == (len(free_runs) - num_behind, max(free_runs, default=0))
        assert report.held == report.promised == sum(name is not None for name in slots)
