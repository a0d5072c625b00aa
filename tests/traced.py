"""A history under a trace: after each step the events alone, replayed, must give the state that the engine is in."""

import json
import tempfile
from pathlib import Path
from typing import Any

from nanovllm.trace import State, apply, traced
from nanovllm.trace.observer import Observer
from nanovllm.trace.replay import begin
from tests.history import History
from tests.plans import Plan
from tests.scripted import Stage, carried

Event = dict[str, Any]


class Twin:
    """A sink: it replays each event, and compares at each step."""

    def __init__(self, stage: Stage, llm: Any) -> None:
        self.stage, self.llm = stage, llm
        self.observer: Observer | None = None
        self.events: list[Event] = []
        self.state: State | None = None

    def __call__(self, event: Event) -> None:
        event = json.loads(json.dumps(event))  # as it comes from a file
        self.events.append(event)
        if event["kind"] == "snapshot":
            self.state = begin(event)
            return
        apply(self.state, event)
        if event["kind"] == "step":
            self.compare()

    def compare(self) -> None:
        """With the engine as it is now."""
        if self.observer is None or self.observer.error:
            return
        self._compare_sequences()
        if self.stage.number == 1:
            pieces = {name: seq.slots for name, seq in self.state.sequences.items() if seq.slots}
            held = {self.observer.name(seq): seq.slots for seq in self.llm.kv_cache_manager._holders}
            assert pieces == {name: (piece.start, piece.end) for name, piece in held.items()}
        else:
            self._compare_device()
        if self.stage.has_tiers:
            self._compare_host()

    def _compare_sequences(self) -> None:
        state, seen, manager = self.state, self.observer.seen, self.llm.kv_cache_manager
        name = self.observer.name
        there = {name(seq): seq for seq in seen}
        assert {key: seq.tokens for key, seq in state.sequences.items()} == {
            key: seq.token_ids for key, seq in there.items()
        }
        computed = {key: seq.num_computed_tokens for key, seq in there.items()}
        assert {key: seq.num_computed_tokens for key, seq in state.sequences.items()} == computed
        assert {key: seq.carried_by for key, seq in state.sequences.items() if seq.carried_by} == {
            name(sample): key for key, seq in there.items() for sample in carried(seq)
        }
        holders = [name(seq) for seq in manager._holders]
        if not self.stage.has_engine:  # its queues are variables of a generator
            assert state.running == holders
        elif self.llm.llm_engine.scheduler.running or not holders:
            assert state.running == [name(seq) for seq in self.llm.llm_engine.scheduler.running]
        else:
            assert sorted(state.running) == sorted(holders)  # beams
        if self.stage.has_engine:
            assert state.waiting == [name(seq) for seq in self.llm.llm_engine.scheduler.waiting]

    def _compare_device(self) -> None:
        state, manager = self.state, self.llm.kv_cache_manager
        pool, tables = manager._pool, {self.observer.name(seq): seq.block_table for seq in self.observer.seen}
        assert {name: seq.block_table for name, seq in state.sequences.items()} == tables
        assert state.free == list(pool._free)
        held = [block for seq in manager._holders for block in seq.block_table]
        assert state.ref_counts == [held.count(block) for block in range(pool.num_blocks)]
        if self.stage.has_samples:
            assert state.ref_counts == pool.ref_counts
        if self.stage.has_prefix_cache:
            assert state.cached == {block: hash_.hex() for hash_, block in pool._cached.items()}

    def _compare_host(self) -> None:
        state, manager = self.state, self.llm.kv_cache_manager
        pool, loads = manager._host_pool, manager._loads
        assert state.host_free == list(pool._free)
        assert state.host_ref_counts == pool.ref_counts
        assert state.host_cached == {block: hash_.hex() for hash_, block in pool._cached.items()}
        assert sorted(state.loading) == sorted(block for load in loads for block in load.sources)
        assert sorted(state.loading.values()) == sorted(block for load in loads for block in load.targets)


def play_traced(stage: Stage, plan: Plan, num_before: int = 0) -> list[Event]:
    """The events of a history; its first `num_before` happenings are not traced."""
    with tempfile.TemporaryDirectory() as folder:
        history = History(stage, plan.knobs, Path(folder))
        for happening in plan.events[:num_before]:
            history.apply(happening)
        twin = Twin(stage, history.llm)
        with traced(history.llm, twin) as twin.observer:
            for happening in plan.events[num_before:]:
                history.apply(happening)
                twin.compare()
                if twin.observer.error:
                    break  # it is raised at the end
            else:
                history.finish()
        return twin.events
