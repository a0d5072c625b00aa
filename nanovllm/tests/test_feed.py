"""The feed of the page: many look, the engine tells once; who is slow begins anew."""

import asyncio
import json
import re
from typing import Any

import pytest

pytest.importorskip("starlette")

from ..server import event_stream, events
from ..server.event_stream import About, EventStream
from ..server.events import Feed, Viewer, snapshot_of
from ..server.page_routes import FOLDER, index, page_routes
from ..trace import apply
from ..trace.replay import Event, State, begin

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
    """A request comes, and takes the first free block."""
    arrival = {"tokens": [1, 2], "texts": ["a", "b"], "max_num_tokens": 6, "carried_by": None, "seconds": 0.0}
    block = {"block": step - 1, "seq": name, "index": 0, "why": "admit"}
    return [
        {"kind": "arrive", "step": step, "by": "x", "seq": name, "request": name, **arrival},
        {"kind": "taken", "step": step, "by": "x", **block},
        {"kind": "admit", "step": step, "by": "x", "seq": name, "num_computed_tokens": 0},
        {"kind": "step", "step": step, "began": 0.0, "seconds": 0.1, "error": None},
    ]


class Engine:
    """What the front sees of one: it is told whether somebody looks."""

    def __init__(self) -> None:
        self.asked: list[bool] = []
        self.feed = Feed(self.watch)

    def watch(self, is_on: bool) -> None:
        self.asked.append(is_on)
        if is_on:
            self.feed.take([SNAPSHOT])


class Page:
    """What a viewer makes of what it is told."""

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


def test_nobody_is_told_anything_until_somebody_looks():
    async def main() -> None:
        engine = Engine()
        engine.feed.take(life("late", 1))  # on its way when the last one left
        assert engine.asked == [] and not engine.feed._new
        page = await Page(engine.feed.enter()).read()
        assert engine.asked == [True] and page.kinds == ["snapshot"] and page.state.free == [*range(NUM_BLOCKS)]
        engine.feed.leave(page.viewer)
        assert engine.asked == [True, False]

    asyncio.run(main())


def test_two_share_a_feed_and_the_second_begins_where_the_first_is():
    async def main() -> None:
        engine = Engine()
        first = await Page(engine.feed.enter()).read()
        engine.feed.take(life("a", 1))
        await first.read()
        engine.feed.take(life("b", 2))  # not told yet: the second one's snapshot must not have it twice
        second = await Page(engine.feed.enter()).read()
        assert second.kinds == ["snapshot"] and second.state == first.state and second.state.running == ["a"]
        await first.read()
        await second.read()
        assert first.state == second.state and second.state.running == ["a", "b"] and second.state.ref_counts[1] == 1
        engine.feed.leave(first.viewer)
        assert engine.asked == [True], "one looks, and the other"

    asyncio.run(main())


def test_at_most_ten_batches_a_second():
    async def main() -> None:
        engine = Engine()
        page = await Page(engine.feed.enter()).read()
        began, num_batches = asyncio.get_running_loop().time(), 0
        for step in range(1, NUM_BLOCKS):
            engine.feed.take(life(f"r{step}", step))
            await asyncio.sleep(0.02)
        while len(page.state.running) < NUM_BLOCKS - 1:
            await page.read()
            num_batches += 1
        seconds = asyncio.get_running_loop().time() - began
        assert num_batches <= 1 + seconds / events.SECONDS_A_BATCH

    asyncio.run(main())


def test_who_is_too_slow_begins_anew(monkeypatch):
    monkeypatch.setattr(events, "MOST_BYTES_WAITING", 1000)
    monkeypatch.setattr(events, "SECONDS_A_BATCH", 0.0)

    async def main() -> None:
        engine = Engine()
        slow, quick = await Page(engine.feed.enter()).read(), await Page(engine.feed.enter()).read()
        for step in range(1, NUM_BLOCKS):
            engine.feed.take(life(f"r{step}", step))
            await quick.read()
            assert slow.viewer._num_bytes <= 1000
        await slow.read()
        assert slow.kinds == ["snapshot", "snapshot"], "what waited for it is dropped"
        assert slow.state == quick.state and len(slow.state.running) == NUM_BLOCKS - 1
        assert quick.viewer.num_snapshots == 1 and slow.viewer.num_snapshots == 2

    asyncio.run(main())


def test_a_snapshot_again_loses_nothing():
    state = begin(SNAPSHOT)
    for event in [*life("a", 1), *life("b", 2)]:
        apply(state, event)
    again: State = begin(json.loads(json.dumps(snapshot_of(state, SNAPSHOT))))
    assert again == state


def test_events_of_an_earlier_look_are_not_told_to_the_next():
    async def main() -> None:
        engine = Engine()
        engine.feed.leave(engine.feed.enter())
        engine.feed._watch = lambda is_on: None  # its snapshot comes later
        page = Page(engine.feed.enter())
        engine.feed.take([*life("old", 1), SNAPSHOT, *life("new", 1)])
        await page.read()
        assert page.state.running == ["new"]

    asyncio.run(main())


class Connection:
    """The ASGI side of one viewer."""

    def __init__(self, is_stuck: bool = False) -> None:
        self.sent: list[Any] = []
        self.hung_up = asyncio.Event()
        self.is_stuck = is_stuck

    async def receive(self) -> dict[str, str]:
        await self.hung_up.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        self.sent.append(message)
        if self.is_stuck and len(self.sent) > 2:
            await asyncio.Event().wait()

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.sent)


async def open_stream(feed: Feed, connection: Connection) -> asyncio.Task[None]:
    stream = EventStream(feed, About("m", False, True))
    task = asyncio.ensure_future(stream({"type": "http"}, connection.receive, connection.send))
    await asyncio.sleep(0.05)
    return task


async def ended(task: asyncio.Task[None]) -> None:
    """wait_for() would cancel it, and then it has ended."""
    done, _ = await asyncio.wait([task], timeout=1)
    assert done, "the connection goes on"
    task.result()


def test_a_connection_begins_with_the_server_and_a_snapshot_and_ends_when_it_hangs_up():
    async def main() -> None:
        engine, connection = Engine(), Connection()
        task = await open_stream(engine.feed, connection)
        assert connection.sent[0]["status"] == 200
        first, second, _ = connection.body.decode().split("\n\n")
        about = {"model": "m", "show_text": False, "can_prompt": True, "run": engine.feed.run}
        assert first == f"event: server\ndata: {json.dumps(about)}"
        assert json.loads(second.removeprefix("data: "))[0]["kind"] == "snapshot"
        connection.hung_up.set()
        await ended(task)
        assert engine.asked == [True, False] and not engine.feed.viewers

    asyncio.run(main())


def test_a_connection_says_that_it_is_alive_and_ends_with_the_engine(monkeypatch):
    monkeypatch.setattr(event_stream, "SECONDS_OF_SILENCE", 0.01)

    async def main() -> None:
        engine, connection = Engine(), Connection()
        task = await open_stream(engine.feed, connection)
        assert connection.body.endswith(b":\n\n")
        engine.feed.close()
        await ended(task)
        assert connection.sent[-1] == {"type": "http.response.body", "body": b"", "more_body": False}
        late = Connection()
        await ended(await open_stream(engine.feed, late))
        assert late.sent[-1]["more_body"] is False and engine.asked == [True]

    asyncio.run(main())


def test_a_connection_that_takes_nothing_is_let_go(monkeypatch):
    monkeypatch.setattr(event_stream, "SECONDS_TO_SEND", 0.05)

    async def main() -> None:
        engine, connection = Engine(), Connection(is_stuck=True)
        task = await open_stream(engine.feed, connection)
        await ended(task)
        assert engine.asked == [True, False] and not engine.feed.viewers

    asyncio.run(main())


@pytest.mark.parametrize("turns", range(4))
def test_a_connection_ends_also_if_something_is_told_while_it_hangs_up(turns):
    """So many turns of the loop later: a cancellation that is lost would keep the server from stopping."""

    async def main() -> None:
        engine, connection = Engine(), Connection()
        task = await open_stream(engine.feed, connection)
        [viewer] = engine.feed.viewers
        connection.hung_up.set()
        for _ in range(turns):
            await asyncio.sleep(0)
        viewer.tell(b"")
        await ended(task)
        assert not engine.feed.viewers

    asyncio.run(main())


def test_the_page_has_an_address_for_each_file_and_no_other():
    paths = {route.path for route in page_routes(can_prompt=True)}
    files = {f"page/{path.name}" for path in FOLDER.iterdir() if path.name != "index.html"}
    assert paths == {"/", "/events", *(f"/{name}" for name in files)}
    assert set(re.findall(r'(?:src|href)="([\w./]+)"', index())) == files
