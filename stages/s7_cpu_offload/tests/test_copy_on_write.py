"""Sequences that share blocks: fork, and the copy that a writer needs. Block size 4."""

import pytest
import torch

from ..block_manager import BlockManager
from ..engine import LLMEngine
from ..kv_cache import BlockCopy
from ..sequence import Sequence
from .scripted import scripted_engine, start


@pytest.fixture
def engine(checkpoint) -> LLMEngine:
    return scripted_engine(checkpoint, num_blocks=8)


@pytest.fixture
def manager(engine) -> BlockManager:
    return engine.kv_cache_manager


def forked(engine: LLMEngine, num_tokens: int, count: int = 2) -> list[Sequence]:
    """Return `count` sequences of that many tokens that share all but the last, which is not computed."""
    first, *others = seqs = [start(engine, name, num_tokens, num_tokens - 1) for name in "abcd"[:count]]
    for other in others:
        engine.kv_cache_manager.free(other)
        engine.kv_cache_manager.fork(first, other)
    return seqs


def test_a_fork_holds_the_same_blocks_and_takes_none(engine, manager):
    parent, child = forked(engine, num_tokens=7)
    assert child.block_table == parent.block_table and child.num_computed_tokens == 6
    assert manager.num_free_blocks == 6
    manager.check_integrity()


def test_a_fork_does_not_hold_blocks_in_which_nothing_is_computed(engine, manager):
    parent, child = start(engine, "a", 12, 5), start(engine, "b", 12, 1)
    manager.free(child)
    manager.fork(parent, child)
    assert (len(parent.block_table), len(child.block_table)) == (3, 2)
    manager.check_integrity()


def test_a_shared_block_is_free_when_its_last_holder_has_freed_it(engine, manager):
    seqs, free = forked(engine, num_tokens=7, count=3), []
    for seq in seqs:
        manager.free(seq)
        manager.check_integrity()
        free.append(manager.num_free_blocks)
    assert free == [6, 6, 8]


def test_each_writer_but_the_last_gets_its_own_copy_of_a_shared_block(engine, manager):
    seqs = forked(engine, num_tokens=7, count=3)
    full, shared = seqs[0].block_table
    copies = [manager.append_slot(seq) for seq in seqs]
    assert [copy and copy.source for copy in copies] == [shared, shared, None]
    assert [seq.block_table[0] for seq in seqs] == [full] * 3
    assert [seq.block_table[1] for seq in seqs] == [copies[0].target, copies[1].target, shared]
    assert len({seq.block_table[1] for seq in seqs}) == 3
    manager.check_integrity()


def test_a_holder_that_is_left_alone_writes_in_place(engine, manager):
    parent, child = forked(engine, num_tokens=7)
    manager.free(parent)
    assert manager.append_slot(child) is None and manager.num_free_blocks == 6


def test_a_sequence_that_has_its_own_copy_gets_no_other_one(engine, manager):
    parent, _ = forked(engine, num_tokens=7)
    assert manager.append_slot(parent) and manager.append_slot(parent) is None


def test_a_token_that_begins_a_block_needs_no_copy(engine, manager):
    seqs = forked(engine, num_tokens=9)
    assert [manager.append_slot(seq) for seq in seqs] == [None, None]
    assert seqs[0].block_table[:2] == seqs[1].block_table[:2] and seqs[0].block_table[2] != seqs[1].block_table[2]
    manager.check_integrity()


@pytest.mark.parametrize("num_tokens", [7, 9], ids=["a copy", "a new block"])
def test_without_a_free_block_only_the_last_holder_can_write(engine, manager, num_tokens):
    parent, child = forked(engine, num_tokens)
    blocker = start(engine, "z", manager.num_free_blocks * 4, 0)
    assert not manager.can_append(parent) and not manager.can_append(child)
    manager.free(child)
    assert manager.can_append(parent) == (num_tokens == 7)
    manager.free(blocker)
    assert manager.can_append(parent)


def test_the_copies_of_a_step_are_read_before_one_is_written(engine):
    """Block 1 is a source and a target, and so is block 2."""
    pool = engine.kv_cache.blocks
    pool.copy_(torch.arange(8).view(8, 1, 1, 1, 1, 1).expand_as(pool))
    engine.kv_cache.copy_blocks([BlockCopy(0, 1), BlockCopy(1, 2), BlockCopy(2, 5)])
    assert [pool[block].unique().tolist() for block in range(8)] == [[0], [0], [1], [3], [4], [2], [6], [7]]
    engine.kv_cache.copy_blocks([])
    assert engine.kv_cache.num_blocks_copied == 3


def test_a_copy_has_the_keys_and_values_of_all_layers(engine):
    pool = engine.kv_cache.blocks
    before = pool.copy_(torch.randn(pool.shape)).clone()
    engine.kv_cache.copy_blocks([BlockCopy(3, 6)])
    assert torch.equal(pool[6], before[3]) and torch.equal(pool[:6], before[:6])
