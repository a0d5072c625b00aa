"""Blocks that several sequences hold: forked without a copy, copied when one of them writes, freed by the last holder.

Blocks have 4 slots. A new pool is taken from the front: 0, 1, 2, ...
"""

import random

import pytest

from ...engine.block_manager import BlockManager, cdiv
from ...engine.block_pool import BlockPool, NoFreeBlocks
from ...engine.kv_cache import BlockCopy
from ...engine.observer import Observer
from ...engine.sequence import Sequence
from ..testing.sequences import admit, fits, holders, make_manager, make_sequence


def computed(manager: BlockManager, num_tokens: int) -> Sequence:
    """Return a sequence that has its blocks and has computed all its tokens."""
    seq = make_sequence("a", num_tokens, max_tokens=50)
    admit(manager, seq)
    seq.num_computed_tokens = num_tokens
    return seq


def forked(manager: BlockManager, parent: Sequence, sample_index: int = 1) -> Sequence:
    child = make_sequence("a", parent.num_tokens, max_tokens=50, sample_index=sample_index)
    child.token_ids = list(parent.token_ids)
    manager.fork(parent, child)
    return child


def family(manager: BlockManager, num_computed: int, n: int) -> list[Sequence]:
    """Return a prompt, all but its last token computed, and its forks: n sequences in all."""
    parent = make_sequence("a", num_computed + 1, max_tokens=50)
    admit(manager, parent)
    parent.num_computed_tokens = num_computed
    return [parent, *(forked(manager, parent, i) for i in range(1, n))]


def tables(seqs: list[Sequence]) -> list[list[int]]:
    return [seq.block_table for seq in seqs]


def state(manager: BlockManager, *seqs: Sequence) -> tuple:
    """Return everything that an operation may change."""
    manager.check_integrity()
    pool, held = manager.pool, [(list(seq.block_table), seq.num_computed_tokens) for seq in seqs]
    return list(pool.ref_counts), list(pool.free), held


# Fork


def test_fork_holds_the_same_blocks_and_takes_none():
    manager = make_manager(4, 4)
    parent, child = family(manager, 6, 2)
    assert tables([parent, child]) == [[0, 1], [0, 1]] and manager.num_free_blocks == 2
    assert (child.num_computed_tokens, child.num_uncomputed_tokens) == (6, 1)
    manager.check_integrity()


@pytest.mark.parametrize("num_computed, table", [(0, []), (1, [0]), (4, [0]), (5, [0, 1]), (8, [0, 1]), (9, [0, 1, 2])])
def test_fork_shares_only_blocks_with_computed_tokens(num_computed, table):
    """The blocks for the rest of the parent's 14 tokens stay with the parent."""
    manager = make_manager(8, 4)
    parent = computed(manager, 14)
    parent.num_computed_tokens = num_computed
    child = forked(manager, parent)
    assert (child.block_table, child.num_computed_tokens) == (table, num_computed)
    assert manager.pool.ref_counts == [2] * len(table) + [1] * (4 - len(table)) + [0] * 4
    manager.check_integrity()


def test_sequence_with_blocks_cannot_be_forked_into():
    manager = make_manager(4, 4)
    parent, child = family(manager, 6, 2)
    before = state(manager, parent, child)
    for target in (child, parent):
        with pytest.raises(AssertionError, match="holds blocks already"):
            manager.fork(parent, target)
    assert state(manager, parent, child) == before


# Writing to a shared block


@pytest.mark.parametrize("n", [1, 2, 3, 5])
def test_partly_full_block_is_copied_for_each_writer_but_the_last(n):
    """The seventh token goes to block 1, which all of them hold."""
    manager = make_manager(20, 4)
    seqs = family(manager, 6, n)
    copies = [manager.append_slot(seq) for seq in seqs]
    assert copies == [BlockCopy(source=1, target=2 + i) for i in range(n - 1)] + [None]
    assert tables(seqs) == [[0, 2 + i] for i in range(n - 1)] + [[0, 1]]
    assert manager.num_free_blocks == 20 - 1 - n
    manager.check_integrity()


def test_block_is_copied_only_once_for_a_writer():
    manager = make_manager(20, 4)
    parent, child = family(manager, 5, 2)
    assert manager.append_slot(parent) == BlockCopy(1, 2)
    before = state(manager, parent, child)
    assert manager.append_slot(parent) is None and state(manager, parent, child) == before
    for seq in (parent, child):
        for _ in range(2):  # the next tokens go to its own block
            manager.append_slot(seq)
            seq.num_computed_tokens = seq.num_tokens
            seq.token_ids.append(7)
            assert manager.append_slot(seq) is None
    assert tables([parent, child]) == [[0, 2], [0, 1]]


# All or nothing


@pytest.mark.parametrize("num_computed, num_blocks", [(6, 2), (8, 3)], ids=["a copy", "a new block"])
def test_slot_that_finds_no_block_changes_no_reference_count(num_computed, num_blocks):
    manager = make_manager(num_blocks, 4)
    parent, child = family(manager, num_computed, 2)
    before = state(manager, parent, child)
    assert not manager.can_append(child)
    with pytest.raises(NoFreeBlocks, match="1 blocks are needed, 0 are free"):
        manager.append_slot(child)
    assert state(manager, parent, child) == before


# Freeing


def test_block_can_be_freed_once_per_holder():
    pool = BlockPool(3, Observer())
    assert pool.get_new_blocks(2) == [0, 1]
    pool.touch([1]), pool.touch([1, 0])
    pool.check_integrity([0, 0, 1, 1, 1])
    pool.free_blocks([1, 0, 1, 1])
    pool.check_integrity([0])
    assert len(pool.free) == 2
    with pytest.raises(AssertionError, match="block 1 "):
        pool.free_blocks([1])


# a and b share block 0; a also holds block 2 and b block 1; blocks 3 to 5 are free.
SPOILERS = {
    "a holder too many": lambda manager, a, b: manager.pool.ref_counts.__setitem__(0, 3),
    "a holder too few": lambda manager, a, b: manager.pool.ref_counts.__setitem__(0, 1),
    "a holder counted at another block": lambda manager, a, b: manager.pool.ref_counts.__setitem__(slice(0, 2), [1, 2]),
    "a shared block counted as free": lambda manager, a, b: manager.pool.ref_counts.__setitem__(0, 0),
    "a shared block in the queue": lambda manager, a, b: manager.pool.free.__setitem__(0, None),
    "a free block lost": lambda manager, a, b: manager.pool.free.pop(4),
    "a block that both hold, counted once": lambda manager, a, b: a.block_table.__setitem__(1, 1),
    "a table that has lost a shared block": lambda manager, a, b: a.block_table.__delitem__(0),
    "a holder forgotten": lambda manager, a, b: holders(manager).remove(b),
    "more computed than there is room for": lambda manager, a, b: setattr(b, "num_computed_tokens", 9),
}


@pytest.mark.parametrize("spoil", SPOILERS.values(), ids=SPOILERS)
def test_check_integrity_notices(spoil):
    manager = make_manager(6, 4)
    a, b = family(manager, 6, 2)
    manager.append_slot(a), manager.append_slot(b)
    manager.check_integrity()
    spoil(manager, a, b)
    with pytest.raises(AssertionError):
        manager.check_integrity()


# Random histories


class Contents:
    """The contents of each slot, moved in the engine's order: all copies of a step at once, then its writes."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.manager, self.block_size = make_manager(num_blocks, block_size), block_size
        self.slots = [[-1] * block_size for _ in range(num_blocks)]
        self.running: list[Sequence] = []
        self.num_copies = 0

    def arrive(self, seq: Sequence) -> None:
        is_enough = cdiv(seq.num_tokens, self.block_size) <= self.manager.num_free_blocks
        assert fits(self.manager, seq) == is_enough
        if is_enough:
            admit(self.manager, seq)
            self.running.append(seq)
        else:
            self.fails(lambda: admit(self.manager, seq), seq)

    def fork(self, parent: Sequence) -> None:
        """Give the child the parent's computed tokens, and a last token of its own."""
        num_free = self.manager.num_free_blocks
        self.running.append(child := forked(self.manager, parent))
        child.token_ids[-1] = -child.token_ids[-1]
        assert self.manager.num_free_blocks == num_free

    def step(self, seqs: list[Sequence], token_id: int) -> None:
        """Let each sequence with room write its last token and get another one."""
        copies, writers = [], []
        for seq in seqs:
            needed = self.num_needed(seq)
            assert self.manager.can_append(seq) == (needed <= self.manager.num_free_blocks)
            if needed <= self.manager.num_free_blocks:
                num_free = self.manager.num_free_blocks
                copies += [copy] if (copy := self.manager.append_slot(seq)) else []
                assert self.manager.num_free_blocks == num_free - needed
                writers.append(seq)
            else:
                self.fails(lambda seq=seq: self.manager.append_slot(seq), seq)
        for target, read in [(copy.target, list(self.slots[copy.source])) for copy in copies]:
            self.slots[target] = read
        self.num_copies += len(copies)
        for i, seq in enumerate(writers):
            for position in range(seq.num_computed_tokens, seq.num_tokens):
                block = seq.block_table[position // self.block_size]
                self.slots[block][position % self.block_size] = seq.token_ids[position]
            seq.num_computed_tokens = seq.num_tokens
            seq.token_ids.append(token_id + i)

    def num_needed(self, seq: Sequence) -> int:
        """Return the blocks that its last token needs, from a count over all tables."""
        index = (seq.num_tokens - 1) // self.block_size
        if index == len(seq.block_table):
            return 1
        return int(sum(seq.block_table[index] in other.block_table for other in self.running) > 1)

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
            assert read[: seq.num_computed_tokens] == seq.token_ids[: seq.num_computed_tokens], (
                "tokens of another sequence"
            )
        held = {block for seq in self.running for block in seq.block_table}
        assert self.manager.num_free_blocks == self.manager.num_blocks - len(held)
        assert self.manager.report().held == self.block_size * len(held)


@pytest.mark.parametrize("seed", range(20))
def test_in_random_histories_each_sequence_reads_what_it_wrote(seed):
    rng = random.Random(seed)
    contents = Contents(*rng.choice([(18, 3), (25, 4), (40, 2), (9, 1), (8, 16)]))
    num_forks = 0
    for number in range(300):
        verb = rng.choice(["arrive", "fork", "fork", "step", "step", "step", "step", "leave"])
        running = contents.running
        if verb == "arrive":
            seq = make_sequence(str(number), rng.randint(1, 3 * contents.block_size), max_tokens=20)
            seq.token_ids = [1000 * number + 500 + i for i in range(seq.num_tokens)]
            contents.arrive(seq)
        elif verb == "fork" and (parents := [seq for seq in running if seq.num_computed_tokens]) and len(running) < 12:
            contents.fork(rng.choice(parents))
            num_forks += 1
        elif running and verb == "step":
            contents.step(rng.sample(running, rng.randint(1, len(running))), 1000 * number)
        elif running and verb == "leave":
            contents.leave(rng.choice(running))
        contents.compare()
    assert num_forks > 15 and (contents.num_copies > 2 or contents.block_size == 1), "this history tests too little"
    for seq in list(contents.running):
        contents.leave(seq)
    assert contents.manager.num_free_blocks == contents.manager.num_blocks
