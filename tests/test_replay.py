"""Requests against a pool alone: stages/bench/replay.py by hand, and on the managers of stages 1 and 2."""

from stages.bench import replay
from stages.bench.workloads import Traffic, traffic
from stages.s1_contiguous_cache.slot_manager import SlotManager
from stages.s2_block_manager.block_manager import BlockManager
from stages.s2_block_manager.llama import ModelConfig

from .counted import Counter, Seq

CONFIG = ModelConfig(64, 8, 8, 1, 1, 1, 8)


def test_replay_admits_in_order_and_stops_when_nobody_waits():
    manager = Counter(8)
    moments = replay.replay(manager, [(Seq(2, 3), 3), (Seq(2, 4), 4), (Seq(1, 1), 1)], num_steps=10)
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


def test_a_promise_is_in_whole_blocks_and_counts_the_others():
    manager = BlockManager(4, block_size=4)
    first, same, larger = sequences(1, 4, 5)
    manager.allocate(first)  # of 5 tokens it may come to have: 2 blocks
    assert replay.can_promise(manager, same)
    assert not replay.can_promise(manager, larger)


def test_replay_asks_who_is_admitted():
    asked = []
    moments = replay.replay(Counter(8), [(Seq(1, 2), 2), (Seq(1, 2), 2)], 10, lambda *pair: asked.append(pair) or False)
    assert [moment.report for moment in moments] == [0] * 10 and len(asked) == 10


def test_pieces_are_moved_together_when_enough_is_free():
    manager, compacting = SlotManager(16, "request", max_model_len=16), replay.Compacting()
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
    assert (report.held, report.used, report.num_blocks) == (16, 10, 4)
