"""Blocks that several sequences hold: forked without a copy, copied when one of them writes, given back by the last.

Blocks have 4 slots. Tables are those of a new pool, which is taken from the front: 0, 1, 2, ...
"""

import random
from collections import Counter

import pytest

from ..block_manager import BlockCopy, BlockManager, cdiv
from ..block_pool import BlockPool, NoFreeBlocks
from ..prefix_cache import PrefixCache
from ..sequence import Sequence, shared_prefix
from .helpers import make_sequence


def computed(manager: BlockManager, num_tokens: int) -> Sequence:
    """A sequence that has its blocks and has computed all its tokens."""
    seq = make_sequence("a", num_tokens, max_tokens=50)
    manager.allocate(seq)
    seq.num_computed_tokens = num_tokens
    return seq


def family(manager: BlockManager, num_tokens: int, n: int) -> list[Sequence]:
    """A parent of so many tokens and its forks, n in all; each has then got a token, which is computed nowhere yet."""
    parent = computed(manager, num_tokens)
    seqs = [parent, *(make_sequence("a", num_tokens, max_tokens=50, sample_index=i) for i in range(1, n))]
    for child in seqs[1:]:
        manager.fork(parent, child, num_tokens)
    for seq in seqs:
        seq.token_ids.append(7)
    return seqs


def tables(seqs: list[Sequence]) -> list[list[int]]:
    return [seq.block_table for seq in seqs]


def state(manager: BlockManager, *seqs: Sequence) -> tuple:
    """All that an operation may change."""
    manager.check_integrity()
    counts = [manager._pool.ref_count(block) for block in range(manager.num_blocks)]
    return counts, list(manager._pool._free), [(list(seq.block_table), seq.num_computed_tokens) for seq in seqs]


def with_tokens(*token_ids: int, num_prompt_tokens: int = 1) -> Sequence:
    seq = make_sequence("a", num_prompt_tokens, max_tokens=50)
    seq.token_ids = list(token_ids)
    return seq


# Fork


def test_a_fork_holds_the_same_blocks_and_takes_none():
    manager = BlockManager(4, 4)
    parent, child = family(manager, 6, 2)
    assert tables([parent, child]) == [[0, 1], [0, 1]]
    assert manager.num_free_blocks == 2
    manager.check_integrity()


def test_what_is_forked_counts_as_computed_and_what_comes_later_does_not():
    _, child = family(BlockManager(4, 4), 6, 2)
    assert (child.num_computed_tokens, child.num_uncomputed_tokens) == (6, 1)


def test_a_table_is_not_shared_only_its_blocks_are():
    manager = BlockManager(4, 4)
    parent, child = family(manager, 8, 2)
    manager.append_slot(parent)
    assert tables([parent, child]) == [[0, 1, 2], [0, 1]]


@pytest.mark.parametrize("num_tokens, table", [(1, [0]), (4, [0]), (5, [0, 1]), (8, [0, 1]), (9, [0, 1, 2])])
def test_a_fork_of_the_first_tokens_holds_the_blocks_of_those(num_tokens, table):
    manager = BlockManager(8, 4)
    parent, child = computed(manager, 14), make_sequence("a", 14, max_tokens=50)
    manager.fork(parent, child, num_tokens)
    assert (child.block_table, child.num_computed_tokens) == (table, num_tokens)
    manager.check_integrity()


def test_what_is_not_computed_cannot_be_forked_and_nothing_changes():
    manager = BlockManager(4, 4)
    parent, child = computed(manager, 8), make_sequence("a", 8, max_tokens=50)
    parent.num_computed_tokens = 5
    before = state(manager, parent, child)
    with pytest.raises(ValueError, match=r"6 .* 5 "):
        manager.fork(parent, child, 6)
    assert state(manager, parent, child) == before
    manager.fork(parent, child, 5)


def test_who_holds_blocks_is_not_forked_into():
    manager = BlockManager(4, 4)
    parent, child = family(manager, 6, 2)
    before = state(manager, parent, child)
    for target in (child, parent):
        with pytest.raises(AssertionError, match="holds blocks already"):
            manager.fork(parent, target, 6)
    assert state(manager, parent, child) == before


def test_sharing_a_block_that_nobody_holds_is_an_error_and_changes_nothing():
    pool = BlockPool(4, PrefixCache(4).blocks)
    assert pool.get_new_blocks(2) == [0, 1]
    with pytest.raises(ValueError, match="block 3 "):
        pool.touch([0, 1, 3])
    pool.check_integrity([0, 1])


# Who writes to a shared block


@pytest.mark.parametrize("n", [1, 2, 3, 5])
def test_a_block_that_is_partly_full_is_copied_once_for_each_writer_but_the_last_who_writes_in_place(n):
    """6 tokens: the seventh goes to block 1, which all hold."""
    manager = BlockManager(20, 4)
    seqs = family(manager, 6, n)
    copies = [manager.append_slot(seq) for seq in seqs]
    assert copies == [BlockCopy(source=1, target=2 + i) for i in range(n - 1)] + [None]
    assert tables(seqs) == [[0, 2 + i] for i in range(n - 1)] + [[0, 1]]
    assert manager.num_free_blocks == 20 - 1 - n
    manager.check_integrity()


def test_block_0_is_shared_and_copied_like_any_other():
    """Its number is no reason to take it for none."""
    manager = BlockManager(20, 4)
    seqs = family(manager, 2, 3)
    assert manager.num_blocks_to_append(*seqs) == 2
    assert [manager.append_slot(seq) for seq in seqs] == [BlockCopy(0, 1), BlockCopy(0, 2), None]
    assert tables(seqs) == [[1], [2], [0]]


def test_who_was_neither_allocated_nor_forked_takes_no_slot():
    """Nobody would give its block back."""
    manager = BlockManager(4, 4)
    seqs = family(manager, 4, 2)
    before = state(manager, *seqs)
    with pytest.raises(AssertionError, match="never allocated"):
        manager.append_slot(make_sequence("a", 5, max_tokens=50))
    assert state(manager, *seqs) == before
    manager.append_slot(seqs[0]), manager.append_slot(seqs[1])
    assert tables(seqs) == [[0, 1], [0, 2]]


@pytest.mark.parametrize("num_tokens", [4, 8])
def test_a_block_that_is_full_is_never_copied(num_tokens):
    manager = BlockManager(20, 4)
    seqs = family(manager, num_tokens, 3)
    assert [manager.append_slot(seq) for seq in seqs] == [None, None, None]
    full = num_tokens // 4
    assert tables(seqs) == [[*range(full), full + i] for i in range(3)]
    manager.check_integrity()


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2)], ids=str)
def test_in_whatever_order_they_write_the_last_one_keeps_the_block(order):
    manager = BlockManager(20, 4)
    seqs = family(manager, 6, 3)
    copied = [manager.append_slot(seqs[i]) is not None for i in order]
    assert copied == [True, True, False] and seqs[order[-1]].block_table == [0, 1]


def test_a_block_once_copied_is_not_copied_again():
    manager = BlockManager(20, 4)
    parent, child = family(manager, 5, 2)
    assert manager.append_slot(parent) == BlockCopy(1, 2)
    before = state(manager, parent, child)
    assert manager.append_slot(parent) is None and state(manager, parent, child) == before
    for seq in (parent, child):
        for _ in range(2):  # its next tokens go to the block that is now its own
            manager.append_slot(seq)
            seq.num_computed_tokens = seq.num_tokens
            seq.token_ids.append(7)
            assert manager.append_slot(seq) is None
    assert tables([parent, child]) == [[0, 2], [0, 1]]


def test_who_is_left_alone_with_a_block_writes_in_place():
    manager = BlockManager(20, 4)
    seqs = family(manager, 6, 3)
    manager.free(seqs[0]), manager.free(seqs[2])
    assert manager.append_slot(seqs[1]) is None and seqs[1].block_table == [0, 1]


def test_a_fork_of_a_fork_shares_with_all():
    manager = BlockManager(20, 4)
    parent, child = family(manager, 6, 2)
    grandchild = make_sequence("a", 6, max_tokens=50)
    manager.fork(child, grandchild, 6)
    grandchild.token_ids.append(7)
    assert [manager.append_slot(seq) for seq in (child, parent, grandchild)] == [(1, 2), (1, 3), None]


def test_a_shared_block_in_the_middle_of_the_parents_table_is_copied_too():
    """The parent has long gone on: it will never write to block 1 again, and still needs what is there."""
    manager = BlockManager(20, 4)
    parent, child = computed(manager, 14), make_sequence("a", 7, max_tokens=50)
    manager.fork(parent, child, 6)
    assert manager.append_slot(child) == BlockCopy(1, 4)
    assert tables([parent, child]) == [[0, 1, 2, 3], [0, 4]]
    parent.token_ids.append(7)
    assert manager.append_slot(parent) is None


def test_a_parent_that_is_not_done_copies_before_it_goes_on():
    """It has computed 6 of 11 tokens when a child takes over 5: its next token goes to a block that both hold."""
    manager = BlockManager(20, 4)
    parent, child = computed(manager, 11), make_sequence("a", 6, max_tokens=50)
    parent.num_computed_tokens = 6
    manager.fork(parent, child, 5)
    assert manager.append_slot(parent) == BlockCopy(1, 3)
    assert manager.append_slot(child) is None
    assert tables([parent, child]) == [[0, 3, 2], [0, 1]]


def test_one_that_has_much_to_compute_gets_its_copy_and_its_other_blocks_at_once():
    """It shares 6 tokens and has 13: a copy of block 1, and two more blocks behind it."""
    manager = BlockManager(20, 4)
    parent, child = computed(manager, 6), make_sequence("a", 13, max_tokens=50)
    manager.fork(parent, child, 6)
    copy = manager.append_slot(child)
    assert copy is not None and copy.source == 1 and child.block_table[:2] == [0, copy.target]
    assert sorted(child.block_table[1:]) == [2, 3, 4]
    manager.check_integrity()


# All or nothing


@pytest.mark.parametrize("num_tokens, num_free", [(6, 0), (13, 2), (13, 0)])
def test_a_slot_that_fails_for_lack_of_blocks_changes_no_reference_count(num_tokens, num_free):
    """With 13 tokens it needs a copy and two blocks: two are not enough."""
    manager = BlockManager(2 + num_free, 4)
    parent, child = computed(manager, 5), make_sequence("a", num_tokens, max_tokens=50)
    manager.fork(parent, child, 5)
    before = state(manager, parent, child)
    assert not manager.can_append(child)
    needed = manager.num_blocks_to_append(child)
    with pytest.raises(NoFreeBlocks, match=f"{needed} blocks are needed, {num_free} are free"):
        manager.append_slot(child)
    assert state(manager, parent, child) == before and needed == 1 + cdiv(num_tokens, 4) - 2


def test_a_fork_succeeds_though_no_block_is_free():
    manager = BlockManager(2, 4)
    parent, child = computed(manager, 6), make_sequence("a", 6, max_tokens=50)
    manager.fork(parent, child, 6)
    assert (manager.num_free_blocks, child.block_table) == (0, [0, 1])


@pytest.mark.parametrize("num_free, can", [(1, False), (2, True)])
def test_a_group_can_go_on_if_there_is_a_block_for_each_but_the_last(num_free, can):
    manager = BlockManager(2 + num_free, 4)
    seqs = family(manager, 6, 3)
    assert manager.num_blocks_to_append(*seqs) == 2
    assert manager.can_append(*seqs) == can
    assert manager.can_append(*seqs[:2]) == can, "two of three who hold it: both copy"
    assert manager.can_append(seqs[0]), "one block is enough for one of them"


def test_a_group_on_a_boundary_needs_a_block_each():
    manager = BlockManager(20, 4)
    assert manager.num_blocks_to_append(*family(manager, 8, 3)) == 3


def test_writers_of_different_blocks_are_counted_apart():
    """Two share block 1; two share block 3; the fifth shares with nobody and is on a boundary."""
    manager = BlockManager(20, 4)
    first, second, (lone,) = family(manager, 6, 2), family(manager, 6, 2), family(manager, 4, 1)
    assert manager.num_blocks_to_append(*first, *second, lone) == 3
    assert manager.num_blocks_to_append(first[0], second[1]) == 2
    assert manager.num_blocks_to_append() == 0 and manager.can_append()


def test_asking_takes_nothing():
    manager = BlockManager(6, 4)
    seqs = family(manager, 6, 3)
    before = state(manager, *seqs)
    manager.num_blocks_to_append(*seqs), manager.can_append(*seqs), manager.can_allocate(*seqs)
    assert state(manager, *seqs) == before


# Giving back


def test_a_block_is_free_when_its_last_holder_has_given_it_back():
    manager = BlockManager(4, 4)
    seqs = family(manager, 6, 3)
    for seq, num_free in zip(seqs, (2, 2, 4), strict=True):
        manager.free(seq)
        assert manager.num_free_blocks == num_free and seq.block_table == []
        manager.check_integrity()


def test_samples_of_one_request_are_told_apart():
    manager = BlockManager(4, 4)
    parent, child = family(manager, 6, 2)
    manager.free(child)
    with pytest.raises(ValueError, match="request a holds no blocks"):
        manager.free(child)
    assert state(manager, parent)[0] == [1, 1, 0, 0]


def test_of_the_blocks_that_come_free_the_first_is_taken_first():
    pool = BlockPool(6, PrefixCache(4).blocks)
    pool.get_new_blocks(5)
    pool.touch([1, 3])
    pool.free_blocks([4, 3, 2, 1])
    pool.check_integrity([0, 1, 3])
    assert pool.get_new_blocks(3) == [4, 2, 5]


def test_a_block_may_be_given_back_as_often_as_it_is_held_and_not_once_more():
    pool = BlockPool(3, PrefixCache(4).blocks)
    assert pool.get_new_blocks(2) == [0, 1]
    pool.touch([1]), pool.touch([1, 0])
    with pytest.raises(ValueError, match="block 1 "):
        pool.free_blocks([0, 1, 1, 0, 1, 1])
    pool.check_integrity([0, 0, 1, 1, 1])
    pool.free_blocks([1, 0, 1, 1])
    pool.check_integrity([0])
    assert pool.num_free_blocks == 2


def test_a_block_is_shared_by_as_many_as_say_so():
    pool = BlockPool(2, PrefixCache(4).blocks)
    pool.get_new_blocks(1)
    pool.touch([0]), pool.touch([0])
    assert (pool.ref_count(0), pool.ref_count(1)) == (3, 0)


# How many blocks a group needs when all is shared that can be


@pytest.mark.parametrize(
    "leader, follower, num_shared",
    [
        ([1, 2, 3], [1, 2, 3], 3),  # all: its next token comes from the leader's logits
        ([1, 2, 3], [1, 2, 4], 2),
        ([1, 2, 3], [1, 5, 3], 1),
        ([1, 2, 3], [1, 2, 3, 4], 3),  # the leader is the beginning of it
        ([1, 2, 3, 4], [1, 2, 3], 2),  # its last token is not the leader's last: it must compute that itself
        ([1, 2, 3, 4], [1], 0),
        ([1], [2], 0),
    ],
)
def test_a_follower_takes_over_what_both_begin_with_but_not_its_own_last_token(leader, follower, num_shared):
    assert shared_prefix(with_tokens(*leader), with_tokens(*follower)) == num_shared


@pytest.mark.parametrize(
    "lengths, num_alike, num_blocks",
    [
        ([6], 6, 2),
        ([6, 6, 6], 6, 2),  # equal: the leader's blocks are enough for now
        ([6, 7], 6, 3),  # block 1 is shared and written
        ([9, 9], 8, 4),  # two full blocks shared
        ([9, 9, 9], 5, 3 + 2 + 2),
        ([6, 14], 6, 2 + 3),
    ],
)
def test_the_blocks_of_a_group_are_those_of_the_leader_and_what_each_has_of_its_own(lengths, num_alike, num_blocks):
    """They begin with as many equal tokens, and go on with their own."""
    group = [
        with_tokens(*[7] * min(num_alike, length), *[i] * (length - num_alike)) for i, length in enumerate(lengths)
    ]
    manager = BlockManager(num_blocks, 4)
    assert manager.num_blocks_for(*group) == num_blocks and manager.can_allocate(*group)
    assert not BlockManager(num_blocks - 1, 4).can_allocate(*group)


# The report


def test_a_block_that_several_hold_counts_once():
    """8 slots of the prompt, of which 6 are used, whoever holds them; each promises for itself."""
    manager = BlockManager(6, 4)
    seqs = family(manager, 6, 3)
    report = manager.report()
    assert (report.held, report.used, report.wasted) == (8, 6, 2)
    assert report.promised == 3 * 56
    assert report.strip(width=24) == "######--" + "." * 16
    assert [table for table, _ in report.tables] == [(0, 1)] * 3
    manager.append_slot(seqs[0])
    seqs[0].num_computed_tokens = 7
    assert manager.report().strip(width=24) == "######--###-" + "." * 12


def test_of_those_who_share_a_block_whoever_has_used_most_of_it_counts():
    manager = BlockManager(4, 4)
    parent, child = computed(manager, 7), make_sequence("a", 7, max_tokens=50)
    manager.fork(parent, child, 5)
    assert manager.report().used == 7 and manager.report().strip(width=16) == "#######-........"


# The check

# a and b share block 0; a has block 2 and b block 1 for its own; blocks 3 to 5 are free.
SPOILERS = {
    "a holder too many": lambda manager, a, b: manager._pool._ref_counts.__setitem__(0, 3),
    "a holder too few": lambda manager, a, b: manager._pool._ref_counts.__setitem__(0, 1),
    "a holder counted at another block": lambda manager, a, b: manager._pool._ref_counts.__setitem__(
        slice(0, 2), [1, 2]
    ),
    "a shared block counted as free": lambda manager, a, b: manager._pool._ref_counts.__setitem__(0, 0),
    "a shared block in the free list": lambda manager, a, b: manager._pool._free.append(0),
    "a free block twice in the list": lambda manager, a, b: manager._pool._free.append(4),
    "a free block lost": lambda manager, a, b: manager._pool._free.remove(4),
    "a block that both hold, counted once": lambda manager, a, b: a.block_table.__setitem__(1, 1),
    "a table that has lost a shared block": lambda manager, a, b: a.block_table.__delitem__(0),
    "a holder forgotten": lambda manager, a, b: manager._holders.__delitem__(b),
    "more computed than there is room for": lambda manager, a, b: setattr(b, "num_computed_tokens", 9),
}


@pytest.mark.parametrize("spoil", SPOILERS.values(), ids=SPOILERS)
def test_the_check_notices(spoil):
    manager = BlockManager(6, 4)
    a, b = family(manager, 6, 2)
    manager.append_slot(a), manager.append_slot(b)
    manager.check_integrity()
    spoil(manager, a, b)
    with pytest.raises(AssertionError):
        manager.check_integrity()


# Any history


class Contents:
    """What is in each slot, and in what order an engine moves it: the copies of a step at once, then its writes."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.manager, self.block_size = BlockManager(num_blocks, block_size), block_size
        self.slots = [[-1] * block_size for _ in range(num_blocks)]
        self.running: list[Sequence] = []
        self.num_copies = 0

    def arrive(self, seq: Sequence) -> None:
        is_enough = cdiv(seq.num_tokens, self.block_size) <= self.manager.num_free_blocks
        assert self.manager.can_allocate(seq) == is_enough
        if is_enough:
            self.manager.allocate(seq)
            self.running.append(seq)
        else:
            self.fails(lambda: self.manager.allocate(seq), seq)

    def fork(self, parent: Sequence, child: Sequence, num_tokens: int) -> None:
        child.token_ids[:num_tokens] = parent.token_ids[:num_tokens]
        num_free = self.manager.num_free_blocks
        self.manager.fork(parent, child, num_tokens)
        assert self.manager.num_free_blocks == num_free
        self.running.append(child)

    def step(self, seqs: list[Sequence], token_id: int) -> None:
        """Each writes all that it has not written yet, and gets one more token; if there is room for all."""
        needed = self.num_needed(seqs)
        assert self.manager.num_blocks_to_append(*seqs) == needed, "blocks for these, counted over all tables"
        assert self.manager.can_append(*seqs) == (needed <= self.manager.num_free_blocks)
        if needed > self.manager.num_free_blocks:
            if len(seqs) == 1:
                self.fails(lambda: self.manager.append_slot(seqs[0]), seqs[0])
            return
        copies = [copy for seq in seqs if (copy := self.manager.append_slot(seq))]
        for target, read in [(copy.target, list(self.slots[copy.source])) for copy in copies]:
            self.slots[target] = read
        self.num_copies += len(copies)
        for i, seq in enumerate(seqs):
            for position in range(seq.num_computed_tokens, seq.num_tokens):
                block = seq.block_table[position // self.block_size]
                self.slots[block][position % self.block_size] = seq.token_ids[position]
            seq.num_computed_tokens = seq.num_tokens
            seq.token_ids.append(token_id + i)

    def num_needed(self, seqs: list[Sequence]) -> int:
        """Blocks for these, one after the other, by a count of all tables."""
        holders = Counter(block for seq in self.running for block in seq.block_table)
        needed = 0
        for seq in seqs:
            needed += cdiv(seq.num_tokens, self.block_size) - len(seq.block_table)
            index = seq.num_computed_tokens // self.block_size
            if index < len(seq.block_table) and holders[seq.block_table[index]] > 1:
                holders[seq.block_table[index]] -= 1
                needed += 1
        return needed

    def fails(self, operation, seq: Sequence) -> None:
        before = state(self.manager, *self.running, seq)
        with pytest.raises(NoFreeBlocks):
            operation()
        assert state(self.manager, *self.running, seq) == before

    def leave(self, seq: Sequence) -> None:
        self.manager.free(seq)
        self.running.remove(seq)

    def compare(self) -> None:
        self.manager.check_integrity()
        for seq in self.running:
            read = [token for block in seq.block_table for token in self.slots[block]]
            assert read[: seq.num_computed_tokens] == seq.token_ids[: seq.num_computed_tokens], "another's tokens"
        held = {block for seq in self.running for block in seq.block_table}
        assert self.manager.num_free_blocks == self.manager.num_blocks - len(held)
        assert self.manager.report().held == self.block_size * len(held)


@pytest.mark.parametrize("seed", range(20))
def test_in_any_history_each_reads_what_it_wrote(seed):
    rng = random.Random(seed)
    contents = Contents(*rng.choice([(18, 3), (25, 4), (40, 2), (9, 1), (8, 16)]))
    num_forks = 0
    for number in range(300):
        verb = rng.choice(["arrive", "fork", "fork", "step", "step", "step", "step", "leave"])
        running = contents.running
        if verb == "arrive":
            contents.arrive(make_sequence(str(number), rng.randint(1, 3 * contents.block_size), max_tokens=20))
        elif verb == "fork" and (parents := [seq for seq in running if seq.num_computed_tokens]) and len(running) < 12:
            parent = rng.choice(parents)
            num_tokens = rng.choice([parent.num_computed_tokens, rng.randint(1, parent.num_computed_tokens)])
            child = make_sequence(parent.request_id, num_tokens + rng.randint(1, 6), max_tokens=20)
            contents.fork(parent, child, num_tokens)
            num_forks += 1
        elif running and verb == "step":
            contents.step(rng.sample(running, rng.randint(1, len(running))), 1000 * number)
        elif running and verb == "leave":
            contents.leave(rng.choice(running))
        contents.compare()
    assert num_forks > 15 and (contents.num_copies > 2 or contents.block_size == 1), "this tests too little"
    for seq in list(contents.running):
        contents.leave(seq)
    assert contents.manager.num_free_blocks == contents.manager.num_blocks
