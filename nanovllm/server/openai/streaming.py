"""Server-sent events as a response."""

import json
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, suppress
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ..requests import HungUp, unless_hung_up

Events = AsyncGenerator[bytes, None]
to_json = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode


class EventStream(Response):
    """Sends events as they come. If the client hangs up, their generator is closed at once."""

    media_type = "text/event-stream"

    def __init__(self, events: Events, first: bytes) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]  # it is not known
        self._events, self._first = events, first

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with suppress(HungUp):
            await unless_hung_up(receive, self._send(send))

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": self._first, "more_body": True})
        async with aclosing(self._events) as events:
            async for event in events:
                await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def stream(events: Events, as_event: Callable[[Exception], bytes], receive: Receive) -> Response:
    """Wait for the first event: what is wrong until then is an answer with a status of its own.

    What is wrong later is told `as_event`, and nothing comes behind it.
    """
    try:
        first = await unless_hung_up(receive, anext(events))
    except BaseException:
        await events.aclose()
        raise
    return EventStream(or_error(events, as_event), first)


async def or_error(events: Events, as_event: Callable[[Exception], bytes]) -> Events:
    try:
        async with aclosing(events):
            async for event in events:
                yield event
    except Exception as error:
        yield as_event(error)


def event_of(value: dict[str, Any], name: bytes = b"") -> bytes:
    return name + b"data: " + to_json(value).encode() + b"\n\n"
