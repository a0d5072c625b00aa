"""The feed of the page: the engine's events, told to everybody who looks, at most ten times a second.

The engine is observed only while somebody looks. It tells each event once. The front replays the events: whoever comes
later, or was too slow, begins with a snapshot of the state that the others are in.
"""

import asyncio
import json
import secrets
from collections.abc import Callable
from typing import Any

from ..trace import State, apply
from ..trace.replay import begin

Event = dict[str, Any]

SECONDS_A_BATCH = 0.1
MOST_BYTES_WAITING = 4 << 20  # for one viewer: then it is too slow


class Viewer:
    """Somebody who looks. What waits for them is bounded: whoever is too slow goes on with a new snapshot."""

    def __init__(self, feed: "Feed") -> None:
        self._feed = feed
        self._waiting: list[bytes] = []
        self._num_bytes = 0
        self._is_new = True  # nothing has been told, or too much
        self._news = asyncio.Event()
        self.num_snapshots = 0

    async def next(self, seconds: float) -> bytes:
        """Wait for what comes next, in the form of server-sent events; empty if nothing comes for so long.

        Raises EOFError when there is no engine any more.
        """
        try:
            async with asyncio.timeout(seconds):  # wait_for() may lose a cancellation, and the viewer would never end
                await self._news.wait()
        except TimeoutError:
            return b""
        if self._feed.is_over:
            raise EOFError("there is no engine any more")
        self._news.clear()
        if self._is_new:
            self._is_new = False
            self.num_snapshots += 1
            return self._feed.snapshot()
        waiting, self._waiting, self._num_bytes = self._waiting, [], 0
        return b"".join(waiting)

    def tell(self, batch: bytes) -> None:
        """A viewer that has no snapshot yet needs no batch: the snapshot has it."""
        if not self._is_new:
            self._waiting.append(batch)
            self._num_bytes += len(batch)
        if self._num_bytes > MOST_BYTES_WAITING:
            self._waiting, self._num_bytes, self._is_new = [], 0, True
        self._news.set()


class Feed:
    """One for the server. `watch(is_on)` makes the engine tell its events, a snapshot first, or stop it."""

    def __init__(self, watch: Callable[[bool], None]) -> None:
        self._watch = watch
        self.run = secrets.token_hex(4)  # a page that comes back after a restart finds another one
        self.viewers: set[Viewer] = set()
        self._header: Event = {}  # of the first snapshot: what never changes
        self._state: State | None = None  # as told: without what has come since the last batch
        self._new: list[Event] = []
        self._flush: asyncio.TimerHandle | None = None
        self._told_at = float("-inf")
        self.is_over = False

    def enter(self) -> Viewer:
        viewer = Viewer(self)
        self.viewers.add(viewer)
        if self.is_over or self._state:
            viewer.tell(b"")
        elif len(self.viewers) == 1:
            self._watch(True)
        return viewer

    def leave(self, viewer: Viewer) -> None:
        self.viewers.discard(viewer)
        if not self.viewers:
            self._state, self._new = None, []
            if not self.is_over:
                self._watch(False)

    def take(self, events: list[Event]) -> None:
        """Events of the engine, in order. They are told with the next batch."""
        if not self.viewers:
            return  # these were on their way when the last one left
        self._new += events
        if self._flush is None:
            loop = asyncio.get_running_loop()
            self._flush = loop.call_at(max(loop.time(), self._told_at + SECONDS_A_BATCH), self.tell)

    def tell(self) -> None:
        """Tell all viewers what is new."""
        self._flush, self._told_at = None, asyncio.get_running_loop().time()
        events, self._new = self._without_a_past(self._new), []
        for event in events:
            if event["kind"] == "snapshot":
                self._header, self._state = event, begin(event)
            elif self._state:
                apply(self._state, event)
        if self._state:
            batch = message(events)
            for viewer in self.viewers:
                viewer.tell(batch)

    def close(self) -> None:
        """There is no engine any more: every viewer is let go."""
        self.is_over = True
        for viewer in self.viewers:
            viewer.tell(b"")

    def snapshot(self) -> bytes:
        """The state that all viewers are in, as they are told it."""
        assert self._state is not None, "nobody is told anything before the engine's snapshot"
        return message([snapshot_of(self._state, self._header)])

    def _without_a_past(self, events: list[Event]) -> list[Event]:
        """Those from the last snapshot on; without a state, none before it can be applied."""
        kinds = [event["kind"] for event in events]
        if "snapshot" in kinds:
            return events[len(kinds) - 1 - kinds[::-1].index("snapshot") :]
        return events if self._state else []


def snapshot_of(state: State, header: Event) -> Event:
    """A snapshot of `state`, with the rest from an earlier one of the same run."""
    sequences = [vars(seq) for seq in state.sequences.values()]
    sequences = [{name: value for name, value in seq.items() if name != "slots"} for seq in sequences]  # stage 1's
    lists = {name: getattr(state, name) for name in header["state"] if name != "sequences"}
    return header | {"step": state.step, "state": {"sequences": sequences, **lists}}


def message(events: list[Event], name: str | None = None) -> bytes:
    """A server-sent event. JSON has no line's end in it; nor has it, here, any character that is not ASCII.

    >>> message([{"kind": "free"}])
    b'data: [{"kind":"free"}]\\n\\n'
    """
    line = f"data: {json.dumps(events, separators=(',', ':'))}\n\n"
    return (f"event: {name}\n{line}" if name else line).encode()
