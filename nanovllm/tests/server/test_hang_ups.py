"""Clients that hang up at any moment: after each message of a request or response, and some turns of the event loop."""

import asyncio
import json
from typing import Any

import pytest
from starlette.types import ASGIApp

from ...server.app import make_apps
from ..testing.inside import SHORT, inside, until

pytestmark = pytest.mark.anyio
CHAT = {"messages": [{"role": "user", "content": "the fox"}], "max_tokens": 3, "temperature": 0}
BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "completion": ("/v1/completions", SHORT | {"n": 2}),
    "stream": ("/v1/completions", SHORT | {"stream": True}),
    "chat": ("/v1/chat/completions", CHAT | {"stream": True}),
    "response": ("/v1/responses", {"input": "the fox", "max_output_tokens": 3, "temperature": 0, "stream": True}),
    "embedding": ("/v1/embeddings", {"input": ["the fox", "a wood"]}),
    "metrics": ("/metrics", {}),
}
TURNS = (0, 1, 3)  # of the event loop after a message
GUARD = 60.0  # seconds


class Connection:
    """One request to the application, as uvicorn would make it. After its hang-up, nothing is sent."""

    def __init__(self, app: ASGIApp, path: str, body: dict[str, Any]) -> None:
        self.num_messages, self.body = 0, b""
        self._is_over, self._has_changed = asyncio.Event(), asyncio.Event()
        half = len(encoded := json.dumps(body).encode()) // 2
        self._parts = [encoded[:half], encoded[half:]]
        headers = [(b"host", b"127.0.0.1"), (b"content-type", b"application/json")]
        scope = {
            "type": "http", "asgi": {"version": "3.0", "spec_version": "2.3"}, "http_version": "1.1", "state": {},
            "method": "POST" if body else "GET", "scheme": "http", "path": path, "raw_path": path.encode(),
            "headers": headers, "query_string": b"", "root_path": "", "client": ("127.0.0.1", 5),
            "server": ("127.0.0.1", 80),
        }  # fmt: skip
        self.task = asyncio.ensure_future(app(scope, self._receive, self._send))  # type: ignore[arg-type]

    def _count(self) -> None:
        self.num_messages += 1
        self._has_changed.set()

    async def _receive(self) -> dict[str, Any]:
        if self._parts and not self._is_over.is_set():
            self._count()
            part = self._parts.pop(0)
            return {"type": "http.request", "body": part, "more_body": bool(self._parts)}
        await self._is_over.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Any) -> None:
        if not self._is_over.is_set():
            self._count()
            self.body += message.get("body", b"")

    async def messages(self, count: int) -> bool:
        """Wait for this many messages. Return False if the request ends with fewer."""
        while self.num_messages < count and not self.task.done():
            self._has_changed.clear()
            changed = asyncio.ensure_future(self._has_changed.wait())
            await asyncio.wait([changed, self.task], return_when=asyncio.FIRST_COMPLETED)
            changed.cancel()
        return self.num_messages >= count

    def hang_up(self) -> None:
        self._is_over.set()


CASES = [(kind, index % 2 == 0) for index, kind in enumerate(BODIES)]
MORE = [pytest.param(kind, not is_cancelled, marks=pytest.mark.full) for kind, is_cancelled in CASES]


@pytest.mark.parametrize("kind, is_cancelled", CASES + MORE)
async def test_hang_up_at_any_moment_leaves_nothing(checkpoint, kind, is_cancelled):
    """A stopping server cancels a request in place of a hang-up. Its neighbors get the same as without it."""
    path, body = BODIES[kind]
    async with inside(checkpoint, show_text=True) as server:
        neighbor = SHORT | {"prompt": [9, 8, 7], "max_tokens": 6}
        expected = (await server.post(**neighbor)).json()["choices"]
        app = make_apps(server.front.state)[0]
        whole = Connection(app, path, body)
        await whole.task
        tasks, num_hang_ups = asyncio.all_tasks(), 0
        for count in range(whole.num_messages + 1):
            for turns in TURNS:
                connection = Connection(app, path, body)
                await connection.messages(count)
                for _ in range(turns):
                    await asyncio.sleep(0)
                num_hang_ups += not connection.task.done()
                connection.task.cancel() if is_cancelled else connection.hang_up()
                await asyncio.wait([connection.task], timeout=GUARD)
                assert connection.task.done() and (connection.task.cancelled() or connection.task.exception() is None)
        assert num_hang_ups > 1
        await until(lambda: server.is_empty and server.front.state.engine.num_requests == 0, GUARD)
        await until(lambda: asyncio.all_tasks() <= tasks, GUARD)
        assert (await server.post(**neighbor)).json()["choices"] == expected
        again = Connection(app, path, body)
        await again.task
        assert again.num_messages >= 2 and again.body
