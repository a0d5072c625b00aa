"""Traces for chrome://tracing and ui.perfetto.dev, in the Trace Event Format, with a thread for each sequence.

    sequence 7   | waiting      | prefill |decode|decode|decode|   preempted   |recompute|decode|
    steps        |              | step 4  |step 5|step 6|step 7|step 8| step 9 | step 10 |step 11|

Counters show held, idle and free blocks, hits, copies and preemptions. An arrow leads from a prompt to each sample that
was forked from it. Loads from the host are slices that may overlap.
"""

from collections.abc import Iterable
from typing import Any

from .events import Event
from .replay import State, apply, begin

PROCESS, STEPS = 1, 0  # ids of the process, and of the thread that shows steps
COUNTER_NAMES = {"hit": "blocks hit", "copied": "blocks copied", "preempt": "preemptions", "stored": "blocks stored"}

Slice = dict[str, Any]  # an event of the Trace Event Format: a slice, an end of an arrow, a counter or a name


def convert(events: Iterable[Event]) -> dict[str, Any]:
    """Return the contents of a file for the viewers. Times are in microseconds."""
    return {"traceEvents": Timeline(events).slices(), "displayTimeUnit": "ms"}


class Timeline:
    """A trace that is converted to slices, arrows and counters."""

    def __init__(self, events: Iterable[Event]) -> None:
        self._events = iter(events)
        snapshot = next(self._events)
        self._state = begin(snapshot)
        self._slices: list[Slice] = []
        self._threads: dict[str, int] = {}  # by sequence, until it ends
        self._waits: dict[str, tuple[int, str]] = {}  # by sequence that isn't running, the start and the reason
        self._last_starts: dict[str, int] = {}  # when each sequence's last slice starts
        self._arrows: dict[str, tuple[int, int]] = {}  # by sample that hasn't run, its source's thread and time
        self._loads: set[int] = set()  # device blocks that are being loaded
        self._counts = dict.fromkeys(COUNTER_NAMES.values(), 0)
        self._num_threads = self._num_arrows = 0
        self._name_events: list[Slice] = []
        self._add_name("process_name", PROCESS, STEPS, snapshot["stage"])
        self._add_name("thread_name", PROCESS, STEPS, "steps")
        for name in self._state.sequences:
            self._add_thread(name, 0, "waiting")
        for name in self._state.running:
            self._waits.pop(name)

    def slices(self) -> list[Slice]:
        """Return the names of threads, and then everything else in order of time."""
        step: list[Event] = []
        end = 0
        for event in self._events:
            apply(self._state, event)
            step.append(event)
            if event["kind"] == "step":
                start, end = microseconds(event["began"]), microseconds(event["seconds"])
                self._add_events(step, start, end)
                self._add_slice(f"step {event['step']}", STEPS, start, end, {"error": event["error"]})
                self._add_counters(end)
                step = []
        end = max([end, *(microseconds(event.get("seconds", 0)) for event in step)])
        self._add_events(step, end, end)  # events after the last step
        self._finish(end)
        return [*self._name_events, *sorted(self._slices, key=lambda event: event["ts"])]

    def _add_events(self, events: list[Event], start: int, end: int) -> None:
        """Add the events that belong to a step, including those between the previous step and this one."""
        for event in events:
            kind, name = event["kind"], event.get("seq", "")
            if kind == "arrive":
                self._add_thread(name, microseconds(event["seconds"]), "carried" if event["carried_by"] else "waiting")
            elif kind == "admit":
                self._end_wait(name, start)
            elif kind == "forked":
                self._end_wait(name, start)
                parent = event["from"]
                if parent in self._last_starts:
                    self._arrows[name] = self._threads[parent], self._last_starts[parent]
            elif kind == "chunk":
                self._add_chunk(name, event, start, end)
            elif kind == "preempt":
                self._waits[name] = end, "preempted"
            elif kind == "end":
                self._end_thread(name, microseconds(event["seconds"]))
            elif kind in ("loaded", "arrived"):
                self._add_load(event, start, end)
            if kind in COUNTER_NAMES:
                self._counts[COUNTER_NAMES[kind]] += 1

    def _finish(self, end: int) -> None:
        """Close all open slices."""
        for name in list(self._waits):
            self._end_wait(name, end)
        for block in list(self._loads):
            self._add_load({"kind": "arrived", "to": block}, end, end)

    # A sequence's thread

    def _add_thread(self, name: str, time: int, state: str) -> None:
        self._num_threads += 1
        self._threads[name] = self._num_threads
        self._waits[name] = time, state
        self._add_name("thread_name", PROCESS, self._num_threads, f"sequence {name}")

    def _end_wait(self, name: str, start: int) -> None:
        """Add the slice of a wait that has ended."""
        since, state = self._waits.pop(name)
        self._add_slice(state, self._threads[name], min(since, start), start, {})

    def _add_chunk(self, name: str, event: Event, start: int, end: int) -> None:
        thread = self._threads[name]
        args = {"tokens": event["end"] - event["start"], "from": event["start"]}
        self._add_slice(event["why"], thread, start, end, args)
        self._last_starts[name] = start
        if name in self._arrows:
            self._num_arrows += 1
            source, time = self._arrows.pop(name)
            arrow = {"name": "fork", "cat": "fork", "id": self._num_arrows, "pid": PROCESS}
            self._slices.append(arrow | {"ph": "s", "tid": source, "ts": time})
            self._slices.append(arrow | {"ph": "f", "bp": "e", "tid": thread, "ts": start})

    def _end_thread(self, name: str, time: int) -> None:
        if name in self._waits:
            self._end_wait(name, time)
        self._last_starts.pop(name, None)
        self._arrows.pop(name, None)
        del self._threads[name]

    # Loads, counters and names

    def _add_load(self, event: Event, start: int, end: int) -> None:
        """Add the start of a load, or its end, which is the end of the step that notices it."""
        fields = {"name": "load", "cat": "load", "id": event["to"], "pid": PROCESS, "tid": STEPS}
        if event["kind"] == "loaded":
            self._loads.add(event["to"])
            self._slices.append(fields | {"ph": "b", "ts": start, "args": {"block of the host": event["from"]}})
        elif event["to"] in self._loads:  # a load from before the trace has no start
            self._loads.remove(event["to"])
            self._slices.append(fields | {"ph": "e", "ts": end})

    def _add_counters(self, time: int) -> None:
        counters = [("pool", pool_counts(self._state)), *((name, {name: n}) for name, n in self._counts.items())]
        counters += [("sequences", {"running": len(self._state.running), "waiting": len(self._state.waiting)})]
        for name, values in counters:
            fields = {"pid": PROCESS, "tid": STEPS, "ts": time, "args": values}
            self._slices.append({"name": name, "ph": "C", **fields})

    def _add_slice(self, name: str, thread: int, start: int, end: int, args: dict[str, Any]) -> None:
        fields = {"pid": PROCESS, "tid": thread, "ts": start, "dur": end - start, "args": args}
        self._slices.append({"name": name, "cat": "step" if thread == STEPS else "sequence", "ph": "X", **fields})

    def _add_name(self, kind: str, process: int, thread: int, name: str) -> None:
        fields = {"pid": process, "tid": thread, "ts": 0, "args": {"name": name}}
        self._name_events.append({"name": kind, "ph": "M", **fields})


def pool_counts(state: State) -> dict[str, int]:
    """Return how many blocks, or slots in stage 1, are held, idle (free but cached), and free and not cached."""
    num_blocks, num_idle, num_free = state.pool["num_blocks"], len(state.idle), len(state.free)
    if state.pool["unit"] == "slots":
        pieces = [seq.slots for seq in state.sequences.values() if seq.slots]
        num_free = num_blocks - sum(end - start for start, end in pieces)
    return {"held": num_blocks - num_free, "idle": num_idle, "free": num_free - num_idle}


def microseconds(seconds: float) -> int:
    return round(seconds * 1e6)
