"""/events: the feed as server-sent events, to one viewer, until either side has gone."""

import asyncio
import json
from contextlib import suppress
from dataclasses import asdict, dataclass

from starlette.types import Receive, Scope, Send

from .events import Feed, Viewer

SECONDS_OF_SILENCE = 15.0  # then a comment says that the connection is alive
SECONDS_TO_SEND = 30.0  # a viewer that takes nothing for so long is gone
HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-store"),
    (b"x-accel-buffering", b"no"),  # a proxy in between must not keep it
    (b"x-content-type-options", b"nosniff"),
]


@dataclass(frozen=True)
class About:
    """The server, as the page says it."""

    model: str
    show_text: bool
    can_prompt: bool  # whether /v1/completions is at this address too


class EventStream:
    """An answer in ASGI: `await EventStream(feed, about)(scope, receive, send)`."""

    def __init__(self, feed: Feed, about: About) -> None:
        self._feed, self._about = feed, about

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": HEADERS})
        about = asdict(self._about) | {"run": self._feed.run}
        await self._send(send, f"event: server\ndata: {json.dumps(about)}\n\n".encode())
        viewer = self._feed.enter()
        telling = asyncio.ensure_future(self._tell(viewer, send))
        gone = asyncio.ensure_future(hung_up(receive))
        try:
            await asyncio.wait([telling, gone], return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._feed.leave(viewer)
            gone.cancel()
            telling.cancel()
            with suppress(asyncio.CancelledError, OSError):  # of which a TimeoutError is one
                await telling

    async def _tell(self, viewer: Viewer, send: Send) -> None:
        with suppress(EOFError):  # there is no engine any more
            while True:
                await self._send(send, await viewer.next(SECONDS_OF_SILENCE) or b":\n\n")
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send(self, send: Send, data: bytes) -> None:
        """Raises TimeoutError if the other side does not take it."""
        body = {"type": "http.response.body", "body": data, "more_body": True}
        async with asyncio.timeout(SECONDS_TO_SEND):
            await send(body)


async def hung_up(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
