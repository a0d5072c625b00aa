"""An answer as server-sent events: chunks as tokens come, and [DONE] where it is whole."""

import json
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ..engine_client import EngineClient
from ..errors import as_error
from ..messages import Piece
from ..requests import HungUp, unless_hung_up
from .choices import chat_chunk_choice, completion_choice
from .work import Work

DONE = b"data: [DONE]\n\n"


class EventStream(Response):
    """Sends events as they come. If the client hangs up, their generator is closed at once."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None], first: bytes) -> None:
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


async def stream(engine: EngineClient, work: Work, receive: Receive) -> Response:
    """Wait for the first event: what is wrong until then is an answer with a status of its own."""
    events = events_of(engine, work)
    try:
        first = await unless_hung_up(receive, anext(events))
    except BaseException:
        await events.aclose()
        raise
    return EventStream(or_error_event(events), first)


async def or_error_event(events: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
    """The events. One that fails is told in an event, and the stream has no [DONE]."""
    try:
        async with aclosing(events):
            async for event in events:
                yield event
    except Exception as error:
        yield event_of(as_error(error)[1])


async def events_of(engine: EngineClient, work: Work) -> AsyncGenerator[bytes, None]:
    """Raises what engine.generate() raises."""
    chunks = Chunks(work)
    async with aclosing(engine.generate(work.requests)) as deltas, aclosing(work.pieces(deltas)) as pieces:
        async for index, piece in pieces:
            yield chunks.of(index, piece)
    if work.body.stream.include_usage:
        yield chunks.last()
    yield DONE


class Chunks:
    """Makes the events of one answer."""

    def __init__(self, work: Work) -> None:
        self._work, self._options = work, work.body.stream
        self._head = work.head("chat.completion.chunk" if work.body.is_chat else "text_completion")
        self._lengths: dict[int, int] = {}  # characters of each choice so far

    def of(self, index: int, piece: Piece) -> bytes:
        """What is new in a choice; the first of a chat says who speaks, in an event of its own."""
        start = self._lengths.get(index)
        self._lengths[index] = (start or 0) + len(piece.text)
        if not self._work.body.is_chat:
            return self._event(completion_choice(piece, index, start or 0))
        event = self._event(chat_chunk_choice(piece, index, self._work.params.logprobs))
        return event if start is not None else self._role(index) + event

    def last(self) -> bytes:
        """What it cost."""
        return event_of({**self._head, "choices": [], "usage": self._work.usage()})

    def _role(self, index: int) -> bytes:
        delta = {"role": "assistant", "content": ""}
        return self._event({"index": index, "delta": delta, "logprobs": None, "finish_reason": None})

    def _event(self, choice: dict[str, Any]) -> bytes:
        chunk = {**self._head, "choices": [choice]}
        if self._options.continuous_usage_stats:
            chunk["usage"] = self._work.usage()
        elif self._options.include_usage:
            chunk["usage"] = None
        return event_of(chunk)


def event_of(value: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"
