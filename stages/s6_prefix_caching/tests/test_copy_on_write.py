"""Sequences that share blocks: the fork, and the copy that a writer needs. Block size 4."""

import pytest
import torch

from ..block_manager import BlockManager
from ..engine import LLMEngine
from ..kv_cache import BlockCopy
from ..sequence import Sequence
from .scripted import scripted_engine, start
from .test_scheduler import Recorder


@pytest.fixture
def engine(checkpoint) -> LLMEngine:
    return scripted_engine(checkpoint, num_blocks=8)


@pytest.fixture
def manager(engine) -> BlockManager:
    return engine.kv_cache_manager


def forked(engine: LLMEngine, num_tokens: int, count: int = 2) -> list[Sequence]:
    """Return `count` sequences of that many tokens. All tokens but the last are computed, and shared."""
    first, *others = seqs = [start(engine, name, num_tokens, num_tokens - 1) for name in "abcd"[:count]]
    for other in others:
        engine.kv_cache_manager.free(other)
        engine.kv_cache_manager.fork(first, other)
    return seqs


def test_a_fork_holds_the_same_blocks_and_takes_none(engine, manager):
    """Of 8 blocks the parent holds 2, with 6 of its 7 tokens computed."""
    parent, child = forked(engine, num_tokens=7)
    assert child.block_table == parent.block_table, "the tables of child and parent differ"
    assert child.num_computed_tokens == 6, f"the child counts {child.num_computed_tokens} tokens as computed"
    assert manager.num_free_blocks == 6, f"{manager.num_free_blocks} blocks are free"
    promised = manager.report().promised
    assert promised == 2 * 64, f"two holders may need 64 slots each, report() counts {promised}: is the child a holder?"
    manager.check_integrity()


def test_a_fork_does_not_hold_blocks_in_which_nothing_is_computed(engine, manager):
    """The parent holds 3 blocks, and its 5 computed tokens are in the first two."""
    parent, child = start(engine, "a", 12, 5), start(engine, "b", 12, 1)
    manager.free(child)
    manager.fork(parent, child)
    assert child.block_table == parent.block_table[:2], f"parent {parent.block_table}, child {child.block_table}"
    assert len(parent.block_table) == 3, f"the parent keeps its third block, and has {parent.block_table}"
    manager.check_integrity()


def test_a_shared_block_is_free_once_its_last_holder_has_freed_it(engine, manager):
    """Three sequences share 2 of 8 blocks, and free them one after the other."""
    seqs, free = forked(engine, num_tokens=7, count=3), []
    for seq in seqs:
        manager.free(seq)
        manager.check_integrity()
        free.append(manager.num_free_blocks)
    assert free == [6, 6, 8], f"after the first, second and third {free} blocks are free"


def test_the_first_of_the_freed_blocks_is_taken_next(manager):
    """Block 3 is shared, and keeps a holder."""
    manager.pool.get_new_blocks(8)
    manager.pool.touch([3])
    manager.pool.free_blocks([6, 3, 0, 5])
    taken = manager.pool.get_new_blocks(3)
    assert taken == [6, 0, 5], f"6, 0 and 5 were freed in a table of this order, and are taken as {taken}"


def test_the_observer_hears_who_is_forked(engine, monkeypatch):
    heard = Recorder("fork")
    monkeypatch.setattr(engine.observer, "tell", heard.tell)
    forked(engine, num_tokens=7)
    assert heard.events == [("fork", "a", "b")], f"b is a fork of a, and the observer heard {heard.events}"


def test_each_writer_but_the_last_gets_its_own_copy_of_a_shared_block(engine, manager):
    """Samples a, b and c share two blocks, and their next token goes to the second one."""
    seqs = forked(engine, num_tokens=7, count=3)
    full, shared = seqs[0].block_table
    copies = [manager.append_slot(seq) for seq in seqs]
    assert all(copies[:2]), f"a and b need a copy of block {shared}, append_slot() returned {copies}"
    assert copies[2] is None, f"only c holds block {shared} by then, and yet it copies: {copies[2]}"
    assert [copy.source for copy in copies[:2]] == [shared, shared], f"block {shared} is the source, not {copies}"
    tables = [seq.block_table for seq in seqs]
    assert tables == [[full, copies[0].target], [full, copies[1].target], [full, shared]]
    assert len({table[1] for table in tables}) == 3, f"two samples would write to one block: {tables}"
    manager.check_integrity()


def test_a_holder_that_is_left_alone_writes_in_place(engine, manager):
    """Parent and child share 2 of 8 blocks, and the parent ends."""
    parent, child = forked(engine, num_tokens=7)
    manager.free(parent)
    copy, free = manager.append_slot(child), manager.num_free_blocks
    assert copy is None and free == 6, f"the child gets {copy}, and {free} blocks are free"


def test_a_sequence_that_has_its_own_copy_gets_no_other_one(engine, manager):
    parent, _ = forked(engine, num_tokens=7)
    first, second = manager.append_slot(parent), manager.append_slot(parent)
    assert first, "its last block is shared, and append_slot() returned no copy"
    assert second is None, f"its last block is its own by then, and append_slot() returned {second}"


def test_a_token_that_begins_a_block_needs_no_copy(engine, manager):
    """The eight tokens before it fill two blocks, which both sequences go on to share."""
    seqs = forked(engine, num_tokens=9)
    assert [manager.append_slot(seq) for seq in seqs] == [None, None]
    first, second = (seq.block_table for seq in seqs)
    assert first[:2] == second[:2] and first[2] != second[2], f"tables {first} and {second}"
    manager.check_integrity()


def test_the_observer_hears_who_takes_a_block_and_of_the_copy(engine, manager, monkeypatch):
    """Sample a needs a copy, b then writes in place, and c begins a block."""
    first, second = forked(engine, num_tokens=7)
    third = start(engine, "c", 9, 8)
    heard = Recorder("grow")
    monkeypatch.setattr(engine.observer, "tell", heard.tell)
    copies = [manager.append_slot(seq) for seq in (first, second, third)]
    expected = [("grow", "a", copies[0]), ("grow", "c", None)]
    assert heard.events == expected, f"it should hear {expected}, and it heard {heard.events}"


@pytest.mark.parametrize("num_tokens", [7, 9], ids=["a copy", "a new block"])
def test_without_a_free_block_only_the_last_holder_can_write(engine, manager, num_tokens):
    parent, child = forked(engine, num_tokens)
    blocker = start(engine, "z", manager.num_free_blocks * 4, 0)
    assert not manager.can_append(parent) and not manager.can_append(child), "both need a block, and none is free"
    manager.free(child)
    if num_tokens == 7:
        assert manager.can_append(parent), "the parent is the last holder, and can write in place"
    else:
        assert not manager.can_append(parent), "the parent's blocks are full, and none is free"
    manager.free(blocker)
    assert manager.can_append(parent), "there are free blocks"


def test_all_copies_of_a_step_are_made_and_counted(engine):
    """The number of each block is in all its slots. Block 0 is copied twice, block 3 once."""
    pool = engine.kv_cache.blocks
    pool.copy_(torch.arange(8).view(8, 1, 1, 1, 1, 1).expand_as(pool))
    engine.kv_cache.copy_blocks([BlockCopy(0, 1), BlockCopy(0, 2), BlockCopy(3, 5)])
    assert [pool[block].unique().tolist() for block in range(8)] == [[0], [0], [0], [3], [4], [3], [6], [7]]
    engine.kv_cache.copy_blocks([])
    counted = engine.kv_cache.num_blocks_copied
    assert counted == 3, f"three blocks were copied, num_blocks_copied is {counted}"


def test_a_copy_has_the_keys_and_values_of_all_layers(engine):
    pool = engine.kv_cache.blocks
    before = pool.copy_(torch.randn(pool.shape)).clone()
    engine.kv_cache.copy_blocks([BlockCopy(source=3, target=6)])
    for layer in range(pool.shape[1]):
        for part, name in enumerate(("keys", "values")):
            assert torch.equal(pool[6, layer, part], before[3, layer, part]), f"the {name} of layer {layer} differ"
    others = [block for block in range(8) if block != 6]
    assert torch.equal(pool[others], before[others]), "a block changed that is no target"
