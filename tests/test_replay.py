"""stages/bench/replay.py, which runs requests against a pool without a model: a counter, and real managers."""

from stages.bench import replay
from stages.bench.engines import silent
from stages.bench.workloads import Traffic, traffic
from stages.s1_contiguous_cache.slot_manager import SlotManager
from stages.s2_block_manager.block_manager import BlockManager
from stages.s2_block_manager.llama import ModelConfig

from .slot_counter import Seq, SlotCounter

CONFIG = ModelConfig(64, 8, 8, 1, 1, 1, 8)


def test_replay_admits_in_order_of_arrival():
    manager = SlotCounter(8)
    moments = replay.replay(manager, [(Seq(2, 3), 3), (Seq(2, 4), 4), (Seq(1, 1), 1)], 10, SlotCounter.can_allocate)
    assert [moment.report for moment in moments] == [
        5,
        5,
        5,
    ]  # the second one needs 6 slots, so it waits, and so does the third
    assert {moment.waiting.size for moment in moments} == {6}
    assert manager.held == 8  # the first one ended after three steps, and the others were admitted


def test_max_tokens_covers_the_output():
    for request in traffic(200, seed=0, longest=512):
        assert 1 <= request.num_output_tokens <= request.max_tokens
        assert request.num_prompt_tokens + request.max_tokens <= 512


def sequences(*sizes, stage="s2", max_tokens=4):
    """Return a sequence for each number of prompt tokens."""
    made = [Traffic(size, max_tokens, max_tokens) for size in sizes]
    return [seq for seq, _ in replay.arrivals(stage, CONFIG, made, longest=64)]


def test_sequence_takes_a_block_only_when_it_needs_one():
    manager = BlockManager(4, 4, silent("s2"))
    made = [Traffic(size, 4, 4) for size in (1, 4, 5)]
    moments = replay.replay(manager, replay.arrivals("s2", CONFIG, made, 64), 10, BlockManager.can_promise)
    assert [moment.report.held for moment in moments] == [8, 12, 12, 12]  # 1 to 4 tokens and 4 to 7 tokens
    assert {moment.num_running for moment in moments} == {2}
    manager.check_integrity()


def test_replay_calls_the_admission_function():
    calls = []
    moments = replay.replay(
        SlotCounter(8), [(Seq(1, 2), 2), (Seq(1, 2), 2)], 10, lambda *pair: calls.append(pair) or False
    )
    assert [moment.report for moment in moments] == [0] * 10 and len(calls) == 10


def test_compaction_moves_pieces_together_when_enough_slots_are_free():
    manager, compacting = SlotManager(16, "request", 16, silent("s1")), replay.Compacting()
    a, b, c, d = sequences(2, 2, 2, 6, stage="s1")  # 6, 6, 6 and 10 slots
    for seq in (a, b):
        assert compacting(manager, seq)
        manager.allocate(seq)
        seq.num_computed_tokens = 3
    assert not compacting(manager, c), "4 slots are free"
    manager.free(a)
    assert not manager.can_allocate(d) and compacting(manager, d)
    assert b.slots.start == 0 and compacting.moved == [3]
    manager.check_integrity()


def test_only_the_last_block_is_partly_wasted():
    report = replay.in_blocks(CONFIG, (1, 4, 5), block_size=4)
    assert (report.held, report.used, report.num_slots) == (16, 10, 16)
