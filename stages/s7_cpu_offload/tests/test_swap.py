"""Swap out and swap in: a group's blocks go to the host and come back, whatever happens on the way.

Blocks have 4 slots, 8 are on the device and 8 on the host unless a test says otherwise. Bytes are compared.
"""

import random

import pytest

from ..block_pool import NoFreeBlocks
from ..sequence import Sequence
from .tiers import Tiers, num_blocks_of

PROMPT = list(range(10, 20))  # two full blocks and two tokens


def swapped(tiers: Tiers, group: list[Sequence]) -> list[Sequence]:
    tiers.manager.swap_out(group)
    tiers.manager.check_integrity()
    return group


def back(tiers: Tiers, group: list[Sequence]) -> None:
    tiers.manager.swap_in(group)
    tiers.manager.check_integrity()


# There and back


@pytest.mark.parametrize("num_tokens", [1, 3, 4, 5, 8, 9, 16])
def test_the_bytes_that_come_back_are_those_that_left(num_tokens):
    tiers = Tiers()
    seq = tiers.running(list(range(10, 10 + num_tokens)))
    before = list(seq.block_table)
    swapped(tiers, [seq])
    assert seq.block_table == [] and len(seq.host_table) == num_blocks_of(seq) == len(before)
    assert seq.num_computed_tokens == num_tokens, "nothing of it is to be computed again"
    other = tiers.running([7] * 13, "b")  # it takes the blocks that were the first one's
    assert set(other.block_table) & set(before)
    tiers.overwrite_what_is_free()
    back(tiers, [seq])
    assert seq.host_table == [] and set(seq.block_table).isdisjoint(other.block_table)
    tiers.assert_bytes(seq, other)
    assert tiers.num_free == (8 - 4 - len(before), 8)


def test_it_goes_on_where_it_was():
    tiers = Tiers()
    seq = tiers.running(PROMPT)
    for _ in range(8):
        swapped(tiers, [seq])
        tiers.overwrite_what_is_free()
        back(tiers, [seq])
        assert tiers.grow(seq) == 0
        tiers.assert_bytes(seq)
    tiers.manager.free(seq)
    tiers.assert_empty()


def test_only_blocks_with_computed_tokens_move():
    """A prompt of 10 tokens of which 5 are computed: the third block is empty."""
    tiers = Tiers()
    seq = tiers.running(PROMPT, num_computed=5)
    assert len(seq.block_table) == 3 and tiers.manager.num_blocks_to_swap([seq]) == 2
    swapped(tiers, [seq])
    assert len(seq.host_table) == 2 == tiers.host_pool.stored.num_blocks and tiers.num_free == (8, 6)
    back(tiers, [seq])
    assert len(seq.block_table) == 2 and not tiers.manager.is_ready(seq)
    assert tiers.manager.append_slot(seq) is None and tiers.manager.is_ready(seq)
    tiers.compute(seq)
    tiers.assert_bytes(seq)


def test_a_slot_that_was_taken_for_the_next_token_does_not_move():
    tiers = Tiers()
    seq = tiers.running(PROMPT[:8])
    tiers.manager.append_slot(seq)
    assert len(seq.block_table) == 3 and tiers.manager.num_blocks_to_swap([seq]) == 2
    swapped(tiers, [seq])
    assert tiers.num_free == (8, 6)
    back(tiers, [seq])
    tiers.assert_bytes(seq)


def test_the_host_s_blocks_are_free_when_the_group_is_back_and_the_device_s_when_it_is_away():
    tiers = Tiers()
    seq = tiers.running(PROMPT)
    assert tiers.num_free == (5, 8)
    swapped(tiers, [seq])
    assert tiers.num_free == (8, 5)
    back(tiers, [seq])
    assert tiers.num_free == (5, 8)


def test_who_is_away_holds_nothing_here():
    tiers = Tiers()
    seq = swapped(tiers, [tiers.running(PROMPT)])[0]
    assert tiers.manager.report().tables == ()
    with pytest.raises(ValueError, match="holds no blocks"):
        tiers.manager.free(seq)
    tiers.manager.check_integrity()


# What is shared


def test_what_is_shared_is_stored_once_and_what_each_has_of_its_own_too():
    """A prompt of 10 tokens, and one more each: two blocks of both, and one of each that only the one has."""
    tiers = Tiers()
    first, second = tiers.group(PROMPT, 2)
    tiers.grow(first, second)
    swapped(tiers, [first, second])
    assert first.host_table[:2] == second.host_table[:2] and first.host_table[2] != second.host_table[2]
    assert tiers.num_free == (8, 4) and tiers.host_pool.stored.num_blocks == 4


@pytest.mark.parametrize("n", [2, 3, 8])
def test_what_is_shared_moves_once_and_is_shared_again(n):
    tiers = Tiers()
    group = tiers.group(PROMPT, n)
    assert tiers.manager.num_blocks_to_swap(group) == 3
    swapped(tiers, group)
    tables = [seq.host_table for seq in group]
    assert tables == [tables[0]] * n and len(tables[0]) == 3
    assert [tiers.manager._host.ref_count(block) for block in tables[0]] == [n] * 3
    assert tiers.num_free == (8, 5) and tiers.host_pool.stored.num_blocks == 3
    tiers.overwrite_what_is_free()
    back(tiers, group)
    tables = [seq.block_table for seq in group]
    assert tables == [tables[0]] * n and len(tables[0]) == 3
    assert [tiers.manager._pool.ref_count(block) for block in tables[0]] == [n] * 3
    assert tiers.num_free == (5, 8) and tiers.host_pool.loaded.num_blocks == 3
    tiers.assert_bytes(*group)


def test_samples_that_came_back_copy_before_they_write_and_the_last_one_writes_in_place():
    tiers = Tiers()
    group = tiers.group(PROMPT, 3)
    swapped(tiers, group)
    back(tiers, group)
    assert tiers.grow(*group) == 2
    tiers.assert_bytes(*group)


def test_what_each_has_of_its_own_moves_too():
    tiers = Tiers(num_blocks=12, num_host_blocks=12)
    group = tiers.group(PROMPT, 3)
    for _ in range(3):
        tiers.grow(*group)
    assert tiers.manager.num_blocks_to_swap(group) == 2 + 3 * 2
    swapped(tiers, group)
    tiers.overwrite_what_is_free()
    back(tiers, group)
    tiers.assert_bytes(*group)
    assert tiers.host_pool.stored.num_blocks == tiers.host_pool.loaded.num_blocks == 8


def test_a_group_whose_followers_hold_nothing_yet_moves_its_leader():
    tiers = Tiers()
    leader, follower = tiers.running(PROMPT, num_computed=6), tiers.sequence(PROMPT, sample_index=1)
    leader.followers = [follower]
    swapped(tiers, [leader, follower])
    assert (len(leader.host_table), follower.host_table) == (2, [])
    back(tiers, [leader, follower])
    assert (len(leader.block_table), follower.block_table) == (2, [])
    tiers.assert_bytes(leader)


def test_a_follower_that_holds_nothing_yet_is_not_away():
    tiers = Tiers()
    leader, follower = tiers.running(PROMPT, num_computed=6), tiers.sequence(PROMPT, sample_index=1)
    leader.followers = [follower]
    swapped(tiers, [leader, follower])
    assert (len(leader.host_table), follower.host_table) == (2, [])
    tiers.manager.drop(leader)
    tiers.assert_empty()


def test_what_others_hold_too_stays_theirs():
    """Two requests with one beginning, found in the cache: one goes away, the other keeps it."""
    tiers = Tiers(is_caching=True)
    first = tiers.running(PROMPT)
    second = tiers.running(PROMPT, "b")
    assert second.block_table[:2] == first.block_table[:2]
    swapped(tiers, [second])
    tiers.overwrite_what_is_free()
    tiers.assert_bytes(first)
    back(tiers, [second])
    tiers.assert_bytes(first, second)
    for seq in (first, second):
        tiers.manager.free(seq)
    tiers.assert_empty()


# Too little room


def test_a_host_that_is_too_small_changes_nothing():
    tiers = Tiers(num_host_blocks=2)
    seq = tiers.running(PROMPT)
    before = tiers.state(), list(seq.block_table)
    with pytest.raises(NoFreeBlocks, match="3 blocks are needed, 2 are free"):
        tiers.manager.swap_out([seq])
    assert (tiers.state(), seq.block_table) == before and seq.host_table == []
    assert tiers.host_pool.stored.num_blocks == 0
    tiers.assert_bytes(seq)


def test_a_device_that_is_too_full_changes_nothing():
    tiers = Tiers()
    seq = swapped(tiers, [tiers.running(PROMPT)])[0]
    tiers.running([7] * 21, "b")
    before = tiers.state(), list(seq.host_table)
    with pytest.raises(NoFreeBlocks, match="3 blocks are needed, 2 are free"):
        tiers.manager.swap_in([seq])
    assert (tiers.state(), seq.host_table) == before and seq.block_table == []
    assert tiers.host_pool.loaded.num_blocks == 0


@pytest.mark.parametrize(
    ("num_tokens", "num_free", "can"),
    [(7, 2, True), (7, 1, False), (8, 3, True), (8, 2, False), (9, 3, True), (9, 2, False)],
)
def test_a_group_comes_back_when_the_block_of_its_next_token_is_there_too(num_tokens, num_free, can):
    tiers = Tiers()
    seq = swapped(tiers, [tiers.running(PROMPT[:num_tokens])])[0]
    tiers.running([7] * 4 * (8 - num_free), "b")
    assert tiers.manager.can_swap_in([seq]) == can
    assert not tiers.manager.can_swap_in([seq], spare=1)
    if can:
        back(tiers, [seq])
        assert tiers.manager.can_append(seq)


def test_samples_come_back_when_the_blocks_that_they_will_copy_are_there_too():
    """10 tokens: 3 blocks, and of 3 samples that go on in the third one 2 copy it."""
    tiers = Tiers()
    group = swapped(tiers, tiers.group(PROMPT, 3))
    blocker = tiers.running([7] * 16, "b")
    assert not tiers.manager.can_swap_in(group)
    tiers.manager.free(blocker)
    assert tiers.manager.can_swap_in(group)
    back(tiers, group)
    assert tiers.manager.can_append(*group)


@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("num_tokens", range(1, 13))
def test_whoever_can_come_back_can_go_on(num_tokens, n):
    """With as few blocks free as it takes, and not many more than that."""
    for num_free in range(13):
        tiers = Tiers(num_blocks=12, num_host_blocks=12)
        group = swapped(tiers, tiers.group(list(range(10, 10 + num_tokens)), n))
        if num_free < 12:
            tiers.running([7] * 4 * (12 - num_free), "b")
        if tiers.manager.can_swap_in(group):
            back(tiers, group)
            assert tiers.manager.can_append(*group)
            tiers.grow(*group)
            tiers.assert_bytes(*group)
            return
        needed = -(-(num_tokens + 1) // 4) + (n - 1)
        assert num_free <= needed, f"{needed} would do"
    pytest.fail("it never could")


# Copies that fail


def test_a_store_that_fails_changes_nothing():
    tiers = Tiers()
    group = tiers.group(PROMPT, 2)
    before, tables = tiers.state(), [list(seq.block_table) for seq in group]
    tiers.fail_copies()
    with pytest.raises(RuntimeError, match="the copy failed"):
        tiers.manager.swap_out(group)
    assert tiers.state() == before and [seq.block_table for seq in group] == tables
    assert not tiers.manager.is_copying
    tiers.fail_copies(False)
    swapped(tiers, group)
    back(tiers, group)
    tiers.assert_bytes(*group)


def test_a_load_that_fails_changes_nothing_and_may_be_tried_again():
    tiers = Tiers()
    group = swapped(tiers, tiers.group(PROMPT, 2))
    before, tables = tiers.state(), [list(seq.host_table) for seq in group]
    tiers.fail_copies()
    with pytest.raises(RuntimeError, match="the copy failed"):
        tiers.manager.swap_in(group)
    assert tiers.state() == before and [seq.host_table for seq in group] == tables
    assert not tiers.manager.is_copying
    tiers.fail_copies(False)
    back(tiers, group)
    tiers.assert_bytes(*group)


@pytest.mark.parametrize("verb", ["store", "load"])
def test_an_interrupt_in_the_middle_of_a_copy_loses_no_block(verb, monkeypatch):
    def interrupt(_):
        raise KeyboardInterrupt

    tiers = Tiers()
    seq = tiers.running(PROMPT)
    if verb == "load":
        swapped(tiers, [seq])
    before = tiers.state()
    monkeypatch.setattr(tiers.host_pool, verb, interrupt)
    with pytest.raises(KeyboardInterrupt):
        (tiers.manager.swap_out if verb == "store" else tiers.manager.swap_in)([seq])
    assert tiers.state() == before
    tiers.manager.check_integrity()


def test_what_is_dropped_is_free_on_the_host():
    tiers = Tiers()
    first, second = swapped(tiers, tiers.group(PROMPT, 2))
    tiers.manager.drop(first)
    assert first.host_table == [] and tiers.num_free == (8, 5), "the second one has it still"
    tiers.manager.check_integrity()
    tiers.manager.drop(second)
    tiers.assert_empty()


def test_who_has_nothing_on_the_host_is_dropped_without_harm():
    tiers = Tiers()
    seq = tiers.running(PROMPT)
    before = tiers.state()
    tiers.manager.drop(seq)
    assert tiers.state() == before
    tiers.assert_bytes(seq)


# Copies that take their time


def test_the_device_s_blocks_are_held_until_they_are_stored():
    tiers = Tiers()
    seq = tiers.running(PROMPT)
    tiers.hold_copies_back()
    swapped(tiers, [seq])
    assert tiers.manager.is_copying and tiers.manager.is_storing
    assert tiers.num_free == (5, 5), "they are on their way: held at both ends"
    tiers.manager.collect()
    assert tiers.num_free == (5, 5)
    tiers.host_pool.finish()
    assert tiers.num_free == (5, 5), "nobody has looked yet"
    tiers.manager.collect()
    assert tiers.num_free == (8, 5) and not tiers.manager.is_copying and not tiers.manager.is_storing


def test_the_host_s_blocks_are_held_until_they_are_loaded_and_the_sequence_is_not_ready_before():
    tiers = Tiers()
    seq = swapped(tiers, [tiers.running(PROMPT)])[0]
    tiers.hold_copies_back()
    back(tiers, [seq])
    assert tiers.num_free == (5, 5) and tiers.manager.is_copying and not tiers.manager.is_storing
    assert not tiers.manager.has_arrived(seq) and not tiers.manager.is_ready(seq)
    tiers.manager.collect()
    assert tiers.num_free == (5, 5) and not tiers.manager.is_ready(seq)
    tiers.host_pool.finish()
    tiers.manager.collect()
    assert tiers.num_free == (5, 8) and tiers.manager.has_arrived(seq) and tiers.manager.is_ready(seq)
    tiers.assert_bytes(seq)


def test_to_collect_and_wait_is_to_have_it_all_done():
    tiers = Tiers()
    seqs = [tiers.running(PROMPT, name) for name in "ab"]
    swapped(tiers, seqs[:1])
    tiers.hold_copies_back()
    swapped(tiers, seqs[1:])
    assert tiers.num_free == (5, 2)
    tiers.manager.collect(wait=True)
    assert tiers.num_free == (8, 2) and not tiers.manager.is_copying
    back(tiers, seqs[:1])
    tiers.manager.collect(wait=True)
    assert tiers.manager.is_ready(seqs[0])
    tiers.assert_bytes(seqs[0])


def test_who_is_freed_while_it_arrives_is_waited_for():
    """Or the copy would write to blocks that somebody else has by then."""
    tiers = Tiers()
    seq = swapped(tiers, [tiers.running(PROMPT)])[0]
    tiers.hold_copies_back()
    back(tiers, [seq])
    tiers.manager.free(seq)
    assert not tiers.host_pool.begun, "it was waited for"
    other = tiers.running([7] * 20, "b")
    tiers.host_pool.finish()
    tiers.assert_bytes(other)
    tiers.manager.free(other)
    tiers.assert_empty()


def test_who_is_swapped_out_again_while_it_arrives_loses_nothing():
    tiers = Tiers()
    group = swapped(tiers, tiers.group(PROMPT, 2))
    tiers.hold_copies_back()
    back(tiers, group)
    swapped(tiers, group)
    assert tiers.num_free == (5, 2), "three blocks here, three there and three there again"
    tiers.manager.collect(wait=True)
    assert tiers.num_free == (8, 5)
    tiers.overwrite_what_is_free()
    back(tiers, group)
    tiers.manager.collect(wait=True)
    tiers.assert_bytes(*group)


def test_who_is_dropped_while_it_is_stored_leaves_no_block_behind():
    tiers = Tiers()
    group = tiers.group(PROMPT, 2)
    tiers.hold_copies_back()
    swapped(tiers, group)
    for seq in group:
        tiers.manager.drop(seq)
    tiers.manager.check_integrity()
    assert tiers.num_free == (5, 8)
    tiers.assert_empty()


def test_who_shares_the_block_that_it_writes_to_is_not_ready_until_it_has_its_own():
    tiers = Tiers()
    group = swapped(tiers, tiers.group(PROMPT, 2))
    back(tiers, group)
    assert [tiers.manager.has_arrived(seq) for seq in group] == [True, True]
    assert [tiers.manager.is_ready(seq) for seq in group] == [False, False]
    copy = tiers.manager.append_slot(group[0])
    assert copy and [tiers.manager.is_ready(seq) for seq in group] == [True, True]


def test_who_would_write_to_a_cached_block_is_not_ready_until_it_is_cached_no_more():
    tiers = Tiers(is_caching=True)
    parent, child = tiers.running(PROMPT[:8]), tiers.sequence([*PROMPT[:6], 90], "b")
    tiers.manager.fork(parent, child, 6)
    tiers.manager.free(parent)
    assert not tiers.manager.is_ready(child)
    assert tiers.manager.append_slot(child) is None
    assert tiers.manager.is_ready(child)


# What the check notices


def lose_a_host_block(tiers: Tiers) -> None:
    tiers.manager._host._free.pop()


def free_a_host_block_that_is_held(tiers: Tiers) -> None:
    tiers.manager._host._free.append(next(iter(tiers.manager._swapped)).host_table[0])


def count_a_host_block_twice(tiers: Tiers) -> None:
    tiers.manager._host._ref_counts[next(iter(tiers.manager._swapped)).host_table[0]] += 1


def forget_who_is_away(tiers: Tiers) -> None:
    tiers.manager._swapped.clear()


def load_into_a_block_that_nobody_holds(tiers: Tiers) -> None:
    tiers.manager._arriving[tiers.manager._pool._free[0]] = tiers.host_pool.load({})


@pytest.mark.parametrize(
    "spoil",
    [
        lose_a_host_block,
        free_a_host_block_that_is_held,
        count_a_host_block_twice,
        forget_who_is_away,
        load_into_a_block_that_nobody_holds,
    ],
)
def test_the_check_notices(spoil):
    tiers = Tiers()
    swapped(tiers, [tiers.running(PROMPT)])
    tiers.hold_copies_back()
    spoil(tiers)
    with pytest.raises(AssertionError):
        tiers.manager.check_integrity()


# Any history


class History:
    """Groups come, grow, go away, come back and end; copies are late or fail; texts are cached or not."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        self.tiers = Tiers(rng.randrange(2, 16), rng.randrange(1, 16), is_caching=rng.random() < 0.6)
        self.tiers.host_pool.is_late = lambda: rng.random() < 0.6
        self.tiers.host_pool.fails = lambda: rng.random() < 0.2
        self.manager = self.tiers.manager
        self.here: list[list[Sequence]] = []
        self.away: list[list[Sequence]] = []

    def come(self) -> None:
        """Two tokens only: many texts begin alike."""
        leader = self.tiers.sequence([self.rng.randrange(2) for _ in range(self.rng.randrange(1, 20))])
        if self.manager.can_allocate(leader):
            self.manager.allocate(leader)
            self.here.append([leader])

    def grow(self) -> None:
        """All of a group compute what they have left, and get a token; one that is alone may be forked."""
        group = self.rng.choice(self.here or [[]])
        if not group or not all(map(self.manager.has_arrived, group)) or not self.manager.can_append(*group):
            return
        copies = [copy for seq in group if (copy := self.manager.append_slot(seq))]
        self.tiers.kv_cache.copy_blocks({copy.target: copy.source for copy in copies})
        assert all(map(self.manager.is_ready, group))
        for seq in group:
            self.tiers.compute(seq)
        if len(group) == 1 and self.rng.random() < 0.5:
            group.append(self.tiers.sequence(group[0].token_ids, sample_index=1))
            self.manager.fork(group[0], group[1], group[0].num_tokens)
        for seq in group:
            seq.token_ids.append(self.rng.randrange(2))

    def swap_out(self) -> None:
        group = self.rng.choice(self.here or [[]])
        if self.manager.num_blocks_to_swap(group):
            try:
                self.manager.swap_out(group)
                self.here.remove(group)
                self.away.append(group)
            except RuntimeError:
                assert all(seq.block_table and not seq.host_table for seq in group)

    def swap_in(self) -> None:
        if self.away and self.manager.can_swap_in(self.away[0]):
            try:
                self.manager.swap_in(self.away[0])
                self.here.append(self.away.pop(0))
            except RuntimeError:
                assert not any(seq.block_table for seq in self.away[0])

    def end_here(self) -> None:
        for seq in self.here.pop(self.rng.randrange(len(self.here))) if self.here else []:
            self.manager.free(seq)

    def end_away(self) -> None:
        for seq in self.away.pop(self.rng.randrange(len(self.away))) if self.away else []:
            self.manager.drop(seq)

    def check(self) -> None:
        self.manager.check_integrity()
        running = [seq for group in self.here for seq in group if self.manager.has_arrived(seq)]
        self.tiers.assert_bytes(*(seq for seq in running if seq.num_computed_tokens))


@pytest.mark.parametrize("seed", range(40))
def test_in_any_history_each_has_what_it_computed(seed):
    history = History(seed)
    verbs = [history.come, history.grow, history.swap_out, history.swap_in, history.end_here, history.end_away]
    for _ in range(120):
        history.manager.collect()
        history.rng.choices([*verbs, history.tiers.host_pool.finish], weights=[2, 4, 2, 4, 1, 0.5, 2])[0]()
        history.check()
    while history.here:
        history.end_here()
    while history.away:
        history.end_away()
    history.tiers.assert_empty()
