"""An answer in chunks: what is new, as it comes, and [DONE] where it is whole."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from ..engine_client import EngineClient
from ..errors import as_error
from ..messages import Piece
from .choices import chat_chunk_choice, completion_choice
from .streaming import event_of
from .work import Work

DONE = b"data: [DONE]\n\n"


def as_chunk(error: Exception) -> bytes:
    """In place of the rest of an answer: there is no [DONE] behind it."""
    return event_of(as_error(error)[1])


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
        self._lengths: dict[int, int] = {}  # characters of the tokens told of each choice: its text may lag behind

    def of(self, index: int, piece: Piece) -> bytes:
        """What is new in a choice; the first of a chat says who speaks, in an event of its own."""
        is_first = index not in self._lengths
        start = self._lengths.setdefault(index, 0)
        if not self._work.body.is_chat:
            choice = completion_choice(piece, index, start)
            if told := choice["logprobs"]:
                self._lengths[index] = start + sum(map(len, told["tokens"]))
            return self._event(choice)
        event = self._event(chat_chunk_choice(piece, index, self._work.params.num_logprobs))
        return self._role(index) + event if is_first else event

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
