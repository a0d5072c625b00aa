"""Responses made of server-sent events, and the detection of clients that hang up."""

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing, suppress
from typing import Any, TypeVar

from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from .errors import HungUp, as_error

T = TypeVar("T")
Events = AsyncGenerator[bytes, None]
to_json = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode


def event_of(value: Any, name: str | None = None) -> bytes:
    r"""Return a value as a server-sent event. Its JSON contains no line breaks.

    >>> event_of([{"kind": "free"}]), event_of({}, "server")
    (b'data: [{"kind":"free"}]\n\n', b'event: server\ndata: {}\n\n')
    """
    data = f"data: {to_json(value)}\n\n"
    return (data if name is None else f"event: {name}\n{data}").encode()


def error_event(error: Exception) -> bytes:
    """Return the event of an error, which ends a stream without [DONE]."""
    return event_of(as_error(error)[1])


class EventStream(StreamingResponse):
    """A response that sends events as they arrive. Its generator is closed as soon as the client disconnects."""

    media_type = "text/event-stream"

    def __init__(self, events: Events, **headers: str) -> None:
        """Store the events. The header X-Accel-Buffering keeps a proxy such as nginx from holding the events back."""
        super().__init__(events, headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no", **headers})
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._events):
            await super().__call__(scope, receive, send)


async def stream(events: Events, as_event: Callable[[Exception], bytes], receive: Receive) -> Response:
    """Wait for the first event, and return a response with all events. Raise any error that comes before the first.

    Raise HungUp if the client hangs up before then. A later error becomes the last event, converted by `as_event`.
    """
    try:
        first_event = await unless_hung_up(receive, anext(events))
    except BaseException:
        await events.aclose()
        raise
    return EventStream(with_error_event(first_event, events, as_event))


async def with_error_event(first_event: bytes, events: Events, as_event: Callable[[Exception], bytes]) -> Events:
    """Yield `first_event`, then the events. If an error ends them, yield that error as the last event."""
    async with aclosing(events):
        yield first_event
        try:
            async for event in events:
                yield event
        except Exception as error:
            yield as_event(error)


async def unless_hung_up(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Return the result of `work`. If the client hangs up before that, cancel `work` and raise HungUp.

    The request's body must already have been read, so that only a disconnect can follow.
    """
    task, hang_up = asyncio.ensure_future(work), asyncio.ensure_future(until_hung_up(receive))
    try:
        await asyncio.wait([task, hang_up], return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise HungUp
        return task.result()
    finally:
        for each in (task, hang_up):
            each.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await each


async def until_hung_up(receive: Receive) -> None:
    """Wait until the client closes the connection. Discard all other messages."""
    while (await receive())["type"] != "http.disconnect":
        pass
