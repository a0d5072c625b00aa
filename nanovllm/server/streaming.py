"""Server-sent events as a response, and clients that hang up."""

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
    r"""Return a server-sent event. JSON has no line breaks.

    >>> event_of([{"kind": "free"}]), event_of({}, "server")
    (b'data: [{"kind":"free"}]\n\n', b'event: server\ndata: {}\n\n')
    """
    data = f"data: {to_json(value)}\n\n"
    return (data if name is None else f"event: {name}\n{data}").encode()


def error_event(error: Exception) -> bytes:
    """Return the event that replaces the rest of a stream. No [DONE] follows it."""
    return event_of(as_error(error)[1])


class EventStream(StreamingResponse):
    """A response that sends events as they arrive. Its generator is closed as soon as the client disconnects."""

    media_type = "text/event-stream"

    def __init__(self, events: Events, **headers: str) -> None:
        """Take the events; X-Accel-Buffering keeps a proxy from holding them back."""
        super().__init__(events, headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no", **headers})
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._events):
            await super().__call__(scope, receive, send)


async def stream(events: Events, as_event: Callable[[Exception], bytes], receive: Receive) -> Response:
    """Return a response with the events. If an error comes before the first event, raise it.

    A later error becomes the last event, converted by `as_event`.
    """
    try:
        first = await unless_hung_up(receive, anext(events))
    except BaseException:
        await events.aclose()
        raise
    return EventStream(or_error(first, events, as_event))


async def or_error(first: bytes, events: Events, as_event: Callable[[Exception], bytes]) -> Events:
    """Yield the events. If an error ends them, yield it as the last one."""
    async with aclosing(events):
        yield first
        try:
            async for event in events:
                yield event
        except Exception as error:
            yield as_event(error)


async def unless_hung_up(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Return the result of `work`. If the client hangs up meanwhile, cancel it and raise HungUp.

    The body of the request must have been read, so that only a disconnect can follow.
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
    """Wait until the client closes the connection."""
    while (await receive())["type"] != "http.disconnect":
        pass
