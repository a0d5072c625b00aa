"""A twin of an engine: the state replayed from its events must equal the engine's own after every step."""

import json
import re
from pathlib import Path
from typing import Any

from ...trace import State, Tracer, apply
from ...trace.events import Event
from ...trace.replay import begin


class Twin:
    """A sink for the trace of `llm` (the package's or a stage's) that compares the states after each step."""

    def __init__(self, llm: Any, tracer: Tracer) -> None:
        self.engine, self.tracer = getattr(llm, "llm_engine", llm), tracer
        self.events: list[Event] = []
        self.state: State | None = None

    def __call__(self, event: Event) -> None:
        event = json.loads(json.dumps(event))  # as if read from a file
        self.events.append(event)
        if event["kind"] == "snapshot":
            self.state = begin(event)
            return
        apply(self.state, event)
        if event["kind"] == "step":
            self.compare()

    def compare(self) -> None:
        """Compare the replayed state with the engine."""
        if self.tracer.error or self.state is None:
            return
        manager = self.engine.kv_cache_manager
        self._compare_sequences()
        if hasattr(manager, "pool"):
            self._compare_pool(manager.pool)
        else:
            seen: Any = self.tracer.recorded  # of stage 1
            held = {self.tracer.name(seq): seq.slots for seq in seen if seq.slots}
            pieces = {name: (slots.start, slots.stop) for name, slots in held.items()}
            assert {name: seq.slots for name, seq in self.state.sequences.items() if seq.slots} == pieces
        if tier := getattr(self.engine, "host_tier", None):
            self._compare_tier(tier)

    def _compare_sequences(self) -> None:
        state, name = self.state, self.tracer.name
        real = {name(seq): seq for seq in self.tracer.recorded}
        assert {key: seq.tokens for key, seq in state.sequences.items()} == {
            key: seq.token_ids for key, seq in real.items()
        }
        computed = {key: seq.num_computed_tokens for key, seq in real.items()}
        assert {key: seq.num_computed_tokens for key, seq in state.sequences.items()} == computed
        carried = {name(each): key for key, seq in real.items() for each in getattr(seq, "to_fork", [])}
        assert {key: seq.carried_by for key, seq in state.sequences.items() if seq.carried_by} == carried
        if scheduler := getattr(self.engine, "scheduler", None):
            assert state.waiting == [name(seq) for seq in scheduler.waiting]
            if not any(seen.is_beam for seen in self.tracer.recorded.values()):
                assert state.running == [name(seq) for seq in scheduler.running]

    def _compare_pool(self, pool: Any) -> None:
        state, seen = self.state, self.tracer.recorded
        tables = {self.tracer.name(seq): seq.block_table for seq in seen}
        assert {name: seq.block_table for name, seq in state.sequences.items()} == tables
        assert state.free == (pool.free[::-1] if isinstance(pool.free, list) else list(pool.free))
        held = [block for seq in seen for block in seq.block_table] + list(state.loading.values())
        held += state.disk_loading
        assert state.ref_counts == [held.count(block) for block in range(pool.num_blocks)]
        assert state.ref_counts == getattr(pool, "ref_counts", state.ref_counts)
        assert state.cached == {block: block_hash.hex() for block, block_hash in getattr(pool, "hashes", {}).items()}

    def _compare_tier(self, tier: Any) -> None:
        state, pool = self.state, tier.pool
        assert state.host_free == list(pool.free)
        assert state.host_ref_counts == pool.ref_counts
        assert state.host_cached == {block: block_hash.hex() for block, block_hash in pool.hashes.items()}
        assert state.loading == {copy.source: copy.target for load in tier.loads for copy in load.copies}


def documented_whys() -> set[tuple[str, str]]:
    """Return a (kind of event, why) pair for each reason that EVENTS.md lists."""
    text = (Path(__file__).parents[2] / "trace" / "EVENTS.md").read_text(encoding="utf-8")
    held_up = re.findall(r"^\| ([a-z]+) \|", text.partition("In held_up,")[2].partition("## ")[0], re.MULTILINE)
    listed = re.findall(r"^\| (\w+) \|.*why: (.*?)\. ", text, re.MULTILINE)
    return {("held_up", why) for why in held_up[1:]} | {
        (kind, why) for kind, whys in listed for why in re.findall(r'"([a-z ]+)"', whys)
    }
