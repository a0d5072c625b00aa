"""Requests against a pool alone: stages/bench/replay.py by hand, and on the managers of stages 1 and 2."""

from stages.bench import replay
from stages.bench.engines import silent
from stages.bench.workloads import Traffic, traffic
from stages.s1_contiguous_cache.slot_manager import SlotManager
from stages.s2_block_manager.block_manager import BlockManager
from stages.s2_block_manager.llama import ModelConfig

from .slot_counter import Counter, Seq

CONFIG = ModelConfig(64, 8, 8, 1, 1, 1, 8)


def test_replay_admits_in_order_and_stops_when_nobody_waits():
    manager = Counter(8)
    moments = replay.replay(manager, [(Seq(2, 3), 3), (Seq(2, 4), 4), (Seq(1, 1), 1)], 10, Counter.can_allocate)
    assert [moment.report for moment in moments] == [5, 5, 5]  # the second needs 6: it waits, and so does the third
    assert {moment.waiting.size for moment in moments} == {6}
    assert manager.held == 8  # after three steps the first has ended, and the others are in


def test_requests_ask_for_what_they_need_or_more():
    for request in traffic(200, seed=0, longest=512):
        assert 1 <= request.num_output_tokens <= request.max_tokens
        assert request.num_prompt_tokens + request.max_tokens <= 512


def sequences(*sizes, stage="s2", max_tokens=4):
    """A sequence for each number of prompt tokens."""
    made = [Traffic(size, max_tokens, max_tokens) for size in sizes]
    return [seq for seq, _ in replay.arrivals(stage, CONFIG, made, longest=64)]


def test_a_sequence_in_blocks_takes_one_when_it_needs_one():
    manager = BlockManager(4, 4, silent("s2"))
    made = [Traffic(size, 4, 4) for size in (1, 4, 5)]
    moments = replay.replay(manager, replay.arrivals("s2", CONFIG, made, 64), 10, BlockManager.can_promise)
    assert [moment.report.held for moment in moments] == [8, 12, 12, 12]  # 1 to 4 tokens, beside 4 to 7
    assert {moment.num_running for moment in moments} == {2}
    manager.check_integrity()


def test_replay_asks_who_is_admitted():
    asked = []
    moments = replay.replay(Counter(8), [(Seq(1, 2), 2), (Seq(1, 2), 2)], 10, lambda *pair: asked.append(pair) or False)
    assert [moment.report for moment in moments] == [0] * 10 and len(asked) == 10


def test_pieces_are_moved_together_when_enough_is_free():
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


def test_texts_in_blocks_waste_their_last_block():
    report = replay.in_blocks(CONFIG, (1, 4, 5), block_size=4)
    assert (report.held, report.used, report.num_slots) == (16, 10, 16)
