"""The page's feed of events: all viewers share one, and a slow viewer starts over with a snapshot."""

import asyncio
import json
import re
from typing import Any

import pytest

pytest.importorskip("starlette")

from ...server import page as live_page
from ...server.page import FOLDER, Feed, Viewer, events_of, index, page_routes, snapshot_of
from ...server.streaming import EventStream
from ...trace import apply
from ...trace.replay import Event, State, begin
from ..testing.inside import until
from ..testing.loop_clock import forward, freeze, turn

pytestmark = pytest.mark.anyio

NUM_BLOCKS = 8
SNAPSHOT: Event = {
    "kind": "snapshot", "step": 0, "version": 2, "stage": "nanovllm", "host": None,
    "pool": {"unit": "blocks", "num_blocks": NUM_BLOCKS, "block_size": 4},
    "max_num_seqs": 4, "max_num_batched_tokens": 16,
    "state": {
        "sequences": [], "waiting": [], "running": [], "ref_counts": [0] * NUM_BLOCKS, "free": [*range(NUM_BLOCKS)],
        "cached": {"3": "ab"}, "host_ref_counts": [], "host_free": [], "host_cached": {}, "loading": {},
    },
}  # fmt: skip


def life(name: str, step: int) -> list[Event]:
    """Return the events of a request that arrives and takes the first free block."""
    arrival = {"tokens": [1, 2], "texts": ["a", "b"], "max_num_tokens": 6, "carried_by": None, "seconds": 0.0}
    block = {"block": step - 1, "seq": name, "index": 0, "why": "admit"}
    return [
        {"kind": "arrive", "step": step, "by": "x", "seq": name, "request": name, **arrival},
        {"kind": "taken", "step": step, "by": "x", **block},
        {"kind": "admit", "step": step, "by": "x", "seq": name, "num_computed_tokens": 0},
        {"kind": "step", "step": step, "began": 0.0, "seconds": 0.1, "error": None},
    ]


class Engine:
    """A stand-in for the engine that records when viewers come and go."""

    def __init__(self) -> None:
        self.calls: list[bool] = []
        self.is_quick = True  # otherwise its snapshot comes later
        self.feed = Feed(self.watch)

    def watch(self, is_on: bool) -> None:
        self.calls.append(is_on)
        if is_on and self.is_quick:
            self.feed.add_events([SNAPSHOT])


class Page:
    """The state that a viewer derives from its events."""

    def __init__(self, viewer: Viewer) -> None:
        self.viewer = viewer
        self.state: State | None = None
        self.kinds: list[str] = []

    async def read(self, seconds: float = 1.0) -> "Page":
        self.take(await self.viewer.next(seconds))
        return self

    def take(self, data: bytes) -> None:
        for block in filter(None, data.decode().split("\n\n")):
            for event in json.loads(block.removeprefix("data: ")):
                self.state = begin(event) if event["kind"] == "snapshot" else apply(self.state, event)
                self.kinds.append(event["kind"])


async def test_engine_sends_events_only_while_there_are_viewers():
    engine = Engine()
    engine.feed.add_events(life("late", 1))  # sent before the last viewer left
    assert engine.calls == []
    page = await Page(engine.feed.enter()).read()
    assert engine.calls == [True] and page.kinds == ["snapshot"] and page.state.free == [*range(NUM_BLOCKS)]
    engine.feed.leave(page.viewer)
    assert engine.calls == [True, False]


async def test_second_viewer_starts_with_the_state_of_the_first():
    engine = Engine()
    first = await Page(engine.feed.enter()).read()
    engine.feed.add_events(life("a", 1))
    await first.read()
    engine.feed.add_events(life("b", 2))  # not sent yet: the second viewer must not get it twice
    second = await Page(engine.feed.enter()).read()
    assert second.kinds == ["snapshot"] and second.state == first.state and second.state.running == ["a"]
    await first.read()
    await second.read()
    assert first.state == second.state and second.state.running == ["a", "b"] and second.state.ref_counts[1] == 1
    engine.feed.leave(first.viewer)
    assert engine.calls == [True], "two viewers, one feed"


async def test_at_most_ten_batches_per_second():
    engine = Engine()
    page = await Page(engine.feed.enter()).read()
    freeze()
    forward(1.0)
    numbers = []
    for step in range(1, NUM_BLOCKS):
        engine.feed.add_events(life(f"r{step}", step))
        await turn()
        page.take(await page.viewer.next(0.0))
        numbers.append(len(page.state.running))
        forward(0.04)
    assert numbers == [1, 1, 1, 4, 4, 4, 7], "a batch at once, then after 0.12 and 0.24 seconds"


async def test_slow_viewer_starts_over(monkeypatch):
    monkeypatch.setattr(live_page, "MAX_WAITING_BYTES", 1000)
    monkeypatch.setattr(live_page, "SECONDS_PER_BATCH", 0.0)
    engine = Engine()
    slow, quick = await Page(engine.feed.enter()).read(), await Page(engine.feed.enter()).read()
    for step in range(1, NUM_BLOCKS):
        engine.feed.add_events(life(f"r{step}", step))
        await quick.read()
    await slow.read()
    assert slow.kinds == ["snapshot", "snapshot"], "its waiting events are dropped"
    assert slow.state == quick.state and len(slow.state.running) == NUM_BLOCKS - 1
    assert quick.kinds.count("snapshot") == 1


def test_snapshot_of_a_state_is_complete():
    state = begin(SNAPSHOT)
    for event in [*life("a", 1), *life("b", 2)]:
        apply(state, event)
    again: State = begin(json.loads(json.dumps(snapshot_of(state, SNAPSHOT))))
    assert again == state


async def test_late_events_of_an_earlier_viewer_are_dropped():
    engine = Engine()
    engine.feed.leave(engine.feed.enter())
    engine.is_quick = False
    page = Page(engine.feed.enter())
    engine.feed.add_events([*life("old", 1), SNAPSHOT, *life("new", 1)])
    await page.read()
    assert page.state.running == ["new"]


class Connection:
    """The ASGI side of one viewer."""

    def __init__(self) -> None:
        self.sent: list[Any] = []
        self.hung_up = asyncio.Event()

    async def receive(self) -> dict[str, str]:
        await self.hung_up.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        self.sent.append(message)

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.sent)


async def open_stream(feed: Feed, connection: Connection) -> asyncio.Task[None]:
    stream = EventStream(events_of(feed, {"model": "m"}))
    task = asyncio.ensure_future(stream({"type": "http"}, connection.receive, connection.send))
    await until(lambda: len(connection.sent) >= 3)  # the head, the server, and a snapshot or the end
    return task


async def ended(task: asyncio.Task[None]) -> None:
    """Wait for the connection to end. wait_for() would end it by cancelling it."""
    done, _ = await asyncio.wait([task], timeout=60)
    assert done, "the connection is still open"
    task.result()


async def test_connection_starts_with_a_snapshot_and_ends_when_the_client_hangs_up():
    engine, connection = Engine(), Connection()
    task = await open_stream(engine.feed, connection)
    assert connection.sent[0]["status"] == 200
    first, second, _ = connection.body.decode().split("\n\n")
    assert first == 'event: server\ndata: {"model":"m"}'
    assert json.loads(second.removeprefix("data: "))[0]["kind"] == "snapshot"
    connection.hung_up.set()
    await ended(task)
    assert engine.calls == [True, False] and not engine.feed.viewers


async def test_connection_sends_heartbeats_and_ends_with_the_engine(monkeypatch):
    monkeypatch.setattr(live_page, "KEEPALIVE_SECONDS", 0.01)
    engine, connection = Engine(), Connection()
    task = await open_stream(engine.feed, connection)
    await until(lambda: connection.body.endswith(b":\n\n"))
    engine.feed.close()
    await ended(task)
    assert connection.sent[-1] == {"type": "http.response.body", "body": b"", "more_body": False}
    late = Connection()
    await ended(await open_stream(engine.feed, late))
    assert late.sent[-1]["more_body"] is False and engine.calls == [True]


@pytest.mark.parametrize("turns", range(4))
async def test_event_during_a_hang_up_does_not_keep_the_connection_open(turns):
    """The event arrives `turns` turns of the loop later. A lost cancellation would keep the server from stopping."""
    engine, connection = Engine(), Connection()
    task = await open_stream(engine.feed, connection)
    [viewer] = engine.feed.viewers
    connection.hung_up.set()
    for _ in range(turns):
        await asyncio.sleep(0)
    viewer.push(b"")
    await ended(task)
    assert not engine.feed.viewers


def test_page_has_a_route_for_each_file_and_no_other():
    paths = {route.path for route in page_routes(can_prompt=True)}
    files = {f"page/{path.name}" for path in FOLDER.iterdir() if path.name != "index.html"}
    assert paths == {"/", "/events", *(f"/{name}" for name in files)}
    assert set(re.findall(r'(?:src|href)="([\w./]+)"', index())) == {"page/page.css", "page/page.js", "page/pool.css"}
