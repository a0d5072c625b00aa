"""Block tables: how many blocks a sequence holds, when it takes one more, and when it gives them back. Block size 4."""

import pytest

from ..engine import LLMEngine
from .scripted import scripted_engine, start


@pytest.fixture
def engine(checkpoint) -> LLMEngine:
    return scripted_engine(checkpoint, num_blocks=6)


def hold(engine: LLMEngine, *lengths: int) -> list:
    """Return a running sequence for each length. Its tokens are computed and have blocks; it has one more token."""
    return [start(engine, f"{length} tokens", length + 1, num_computed=length) for length in lengths]


@pytest.mark.parametrize("num_tokens, num_blocks", [(1, 1), (4, 1), (5, 2), (8, 2), (9, 3)])
def test_sequence_holds_as_many_blocks_as_its_tokens_fill(engine, num_tokens, num_blocks):
    [seq] = hold(engine, num_tokens)
    assert len(set(seq.block_table)) == num_blocks
    assert engine.kv_cache_manager.num_free_blocks == 6 - num_blocks


def test_any_free_block_serves(engine):
    """Every other block is free, and a sequence that needs three gets these."""
    seqs = hold(engine, 3, 4, 1, 4, 2, 4)
    free = [seq.block_table[0] for seq in seqs[::2]]
    for seq in seqs[::2]:
        engine.kv_cache_manager.free(seq)
    [late] = hold(engine, 12)
    assert sorted(late.block_table) == sorted(free)
    engine.kv_cache_manager.check_integrity()


def test_sequence_takes_a_block_exactly_when_its_blocks_are_full(engine):
    [seq], num_blocks = hold(engine, 3), []
    for _ in range(7):
        engine.kv_cache_manager.append_slot(seq)
        num_blocks.append(len(seq.block_table))
        seq.num_computed_tokens += 1
        seq.token_ids.append(7)
    assert num_blocks == [1, 2, 2, 2, 2, 3, 3], "with 4, 5, 6 ... 10 tokens"


def test_without_a_free_block_a_sequence_can_only_fill_its_last_one(engine):
    full, begun = hold(engine, 8, 15)
    assert not engine.kv_cache_manager.can_append(full) and engine.kv_cache_manager.can_append(begun)
    engine.kv_cache_manager.free(begun)
    assert engine.kv_cache_manager.can_append(full)


def test_freed_sequence_gives_all_its_blocks_back(engine):
    first, second = hold(engine, 8, 5)
    engine.kv_cache_manager.free(first)
    assert (first.block_table, first.num_computed_tokens) == ([], 0)
    assert (engine.kv_cache_manager.num_free_blocks, len(second.block_table)) == (4, 2)


def test_report_counts_slots_and_peak_is_the_report_with_most_held(engine):
    first, second = hold(engine, 9, 3)
    report = engine.kv_cache_manager.report()
    assert (report.num_slots, report.held, report.used, report.wasted) == (24, 16, 12, 4)
    engine.kv_cache_manager.free(first)
    hold(engine, 4)
    assert engine.kv_cache_manager.peak == report
    engine.kv_cache_manager.free(second)
    assert engine.kv_cache_manager.peak == report


def test_integrity_check_finds_a_block_in_two_places_and_one_in_none(engine):
    first, second = hold(engine, 4, 4)
    second.block_table = first.block_table
    with pytest.raises(AssertionError):
        engine.kv_cache_manager.check_integrity()
