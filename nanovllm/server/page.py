"""The live page: its files, and /events, the stream of events that it plays back.

The engine records events only while at least one page is open, and sends each event once. The API server replays them,
so that a viewer that joins later starts with a snapshot of the current state.
"""

import asyncio
import re
import secrets
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ..trace import State, apply
from ..trace.replay import begin
from .errors import ApiError
from .streaming import Events, EventStream, event_of

Event = dict[str, Any]
Endpoint = Callable[[Request], Awaitable[Response]]

MAX_VIEWERS = 64  # open pages; each batch of events is encoded once and sent to all of them
SECONDS_PER_BATCH = 0.1
KEEPALIVE_SECONDS = 15.0  # without events, after which a comment keeps the connection alive
MAX_WAITING_BYTES = 4 << 20  # unsent events of one viewer; a viewer with more is too slow, and starts over
FOLDER = Path(__file__).with_name("page")
CONTENT_POLICY = (  # data: allows the empty icon
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
    "base-uri 'self'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": CONTENT_POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


# Routes


def page_routes(can_prompt: bool, root_path: str = "") -> list[Route]:
    """Return a route for /events and one for each file of the page, so that no other file can be read.

    `can_prompt` tells the page whether /v1/ is at the same address. `root_path` is a proxy's path prefix.
    """
    files = [file_route(path) for path in sorted(FOLDER.iterdir()) if path.suffix in (".css", ".js")]

    async def events(request: Request) -> EventStream:
        state = request.app.state.server
        if len(state.feed.viewers) >= MAX_VIEWERS:
            raise ApiError(f"This server's page is already open {MAX_VIEWERS} times, which is the limit.", 503)
        model = state.model
        server = {"model": model.name, "show_text": state.options.show_text, "run": state.feed.run}
        chat = {"can_prompt": can_prompt, "can_chat": model.can_chat, "stop": model.chat_stop}
        return EventStream(events_of(state.feed, server | chat))

    return [Route("/", file_endpoint(index(root_path), "text/html")), *files, Route("/events", events, methods=["GET"])]


def index(root_path: str = "") -> str:
    """Return index.html with links to page/, which also work behind a proxy's `root_path` without a final slash."""
    html = (FOLDER / "index.html").read_text(encoding="utf-8")
    html = html.replace("<head>", f'<head>\n<base href="{root_path.rstrip("/")}/">') if root_path else html
    return re.sub(r'(src|href)="([\w.]+)"', r'\1="page/\2"', html)


def file_route(path: Path) -> Route:
    """Return the route of a style sheet or a script."""
    media_type = "text/css" if path.suffix == ".css" else "text/javascript"
    return Route(f"/page/{path.name}", file_endpoint(path.read_text(encoding="utf-8"), media_type))


def file_endpoint(text: str, media_type: str) -> Endpoint:
    """Return an endpoint that serves `text`."""

    async def serve_file(request: Request) -> Response:
        return Response(text, media_type=media_type, headers=HEADERS)

    return serve_file


async def events_of(feed: "Feed", server: Event) -> Events:
    """Yield a description of the server, then one viewer's events until the engine ends.

    Closing the generator removes the viewer.
    """
    yield event_of(server, "server")
    viewer = feed.enter()
    try:
        with suppress(EOFError):
            while True:
                yield await viewer.next(KEEPALIVE_SECONDS) or b":\n\n"
    finally:
        feed.leave(viewer)


# The feed


class Viewer:
    """A client of /events. If it is too slow, it starts over with a new snapshot, so that its backlog stays small."""

    def __init__(self, feed: "Feed") -> None:
        self._feed = feed
        self._batches: list[bytes] = []
        self._num_bytes = 0
        self._needs_snapshot = True
        self._has_update = asyncio.Event()

    async def next(self, seconds: float) -> bytes:
        """Wait up to `seconds` for server-sent events, and return them or b"". Raise EOFError if the feed is closed."""
        try:
            async with asyncio.timeout(seconds):  # wait_for() could lose a cancellation, and leave() would not run
                await self._has_update.wait()
        except TimeoutError:
            return b""
        if self._feed.is_closed:
            raise EOFError("the engine has ended")
        self._has_update.clear()
        if self._needs_snapshot:
            self._needs_snapshot = False
            return self._feed.snapshot()
        batches, self._batches, self._num_bytes = self._batches, [], 0
        return b"".join(batches)

    def push(self, batch: bytes) -> None:
        """Add a batch for next(). A viewer that awaits a snapshot drops the batch, which the snapshot will include."""
        if not self._needs_snapshot:
            self._batches.append(batch)
            self._num_bytes += len(batch)
        if self._num_bytes > MAX_WAITING_BYTES:
            self._batches, self._num_bytes, self._needs_snapshot = [], 0, True
        self._has_update.set()


class Feed:
    """The engine's events, passed on to all viewers. `watch(is_on)` makes the engine start or stop sending them."""

    def __init__(self, watch: Callable[[bool], None]) -> None:
        self._watch = watch
        self.run = secrets.token_hex(4)  # lets a page that reconnects notice that the server has restarted
        self.viewers: set[Viewer] = set()
        self._header: Event = {}  # the engine's last snapshot; snapshots made here copy its constant parts
        self._state: State | None = None  # after the last batch
        self._new: list[Event] = []  # events of the next batch
        self._timer: asyncio.TimerHandle | None = None
        self._flushed_at = float("-inf")
        self.is_closed = False

    def enter(self) -> Viewer:
        """Add a viewer. The first viewer starts the engine's recording."""
        viewer = Viewer(self)
        self.viewers.add(viewer)
        if self.is_closed or self._state:
            viewer.push(b"")  # a snapshot, or the end, is ready for next()
        elif len(self.viewers) == 1:
            self._watch(True)
        return viewer

    def leave(self, viewer: Viewer) -> None:
        """Remove a viewer. The last viewer to leave stops the engine's recording."""
        self.viewers.discard(viewer)
        if not self.viewers:
            self._state, self._new = None, []
            if not self.is_closed:
                self._watch(False)

    def add_events(self, events: list[Event]) -> None:
        """Add the engine's events, in order, to the next batch."""
        if not self.viewers:
            return  # the last viewer left before these events arrived
        self._new += events
        if self._timer is None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_at(max(loop.time(), self._flushed_at + SECONDS_PER_BATCH), self.flush)

    def flush(self) -> None:
        """Push the new events to all viewers."""
        self._timer, self._flushed_at = None, asyncio.get_running_loop().time()
        events, self._new = self._from_snapshot(self._new), []
        for event in events:
            if event["kind"] == "snapshot":
                self._header, self._state = event, begin(event)
            elif self._state:
                apply(self._state, event)
        if self._state:
            batch = event_of(events)
            for viewer in self.viewers:
                viewer.push(batch)

    def close(self) -> None:
        """Disconnect all viewers, because the engine has ended."""
        self.is_closed = True
        for viewer in self.viewers:
            viewer.push(b"")

    def snapshot(self) -> bytes:
        """Return the current state as a server-sent event."""
        assert self._state is not None, "the engine's snapshot comes before any other event"
        return event_of([snapshot_of(self._state, self._header)])

    def _from_snapshot(self, events: list[Event]) -> list[Event]:
        """Return the events from their last snapshot on. Without one, return all, or none if there is no state yet."""
        kinds = [event["kind"] for event in events]
        if "snapshot" in kinds:
            return events[len(kinds) - 1 - kinds[::-1].index("snapshot") :]
        return events if self._state else []


def snapshot_of(state: State, header: Event) -> Event:
    """Return a snapshot of `state`. Its constant parts come from `header`, an earlier snapshot of the same run."""
    # Snapshots have no slots: only stage 1's sequences have any.
    sequences = [
        {name: each for name, each in vars(seq).items() if name != "slots"} for seq in state.sequences.values()
    ]
    others = {name: getattr(state, name) for name in header["state"] if name != "sequences"}
    return header | {"step": state.step, "state": {"sequences": sequences, **others}}
