"""A stream of a completion as bytes: asked for, read, and told whole from broken."""

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from urllib.parse import urlsplit

EVENT = b"data: "


class Ask(NamedTuple):
    """A request for a stream."""

    path: str
    body: str  # JSON

    @property
    def value(self) -> dict[str, Any]:
        return json.loads(self.body)

    def head(self) -> bytes:
        told = f"host: storm\r\ncontent-type: application/json\r\ncontent-length: {len(self.body)}\r\nconnection: close"
        return f"POST {self.path} HTTP/1.1\r\n{told}\r\n\r\n".encode()


@dataclass
class Answer:
    """What has come of a stream."""

    texts: dict[int, str] = field(default_factory=dict)  # by choice
    reasons: dict[int, str] = field(default_factory=dict)
    is_done: bool = False  # [DONE] has come, and nothing behind it
    error: str | None = None

    @property
    def is_whole(self) -> bool:
        """Nothing less is an answer: each choice has ended with a reason, and the stream with [DONE]."""
        return self.is_done and self.error is None and bool(self.texts) and self.texts.keys() == self.reasons.keys()

    @property
    def said(self) -> dict[int, tuple[str, str]]:
        return {index: (text, self.reasons[index]) for index, text in sorted(self.texts.items())}

    def add(self, data: bytes) -> None:
        """An event's data."""
        assert not self.is_done, f"{data!r} comes behind [DONE]"
        if data == b"[DONE]":
            self.is_done = True
            return
        chunk = json.loads(data)
        if "error" in chunk:
            self.error = chunk["error"]["message"]
            return
        for choice in chunk["choices"]:
            index = choice["index"]
            text = choice["text"] if "text" in choice else choice["delta"].get("content", "")
            self.texts[index] = self.texts.get(index, "") + text
            if choice["finish_reason"] is not None:
                self.reasons[index] = choice["finish_reason"]


def address_of(url: str) -> tuple[str, int]:
    split = urlsplit(url)
    assert split.hostname and split.port, url
    return split.hostname, split.port


async def ask_for(url: str, ask: Ask, note: Callable[[bytes], None] = lambda received: None) -> Answer:
    """Read a stream to its end, whatever that is. `note` is called with each piece of what comes."""
    reader, writer = await asyncio.open_connection(*address_of(url))
    try:
        writer.write(ask.head() + ask.body.encode())
        pieces = []
        while piece := await reader.read(1 << 16):
            pieces.append(piece)
            note(piece)
    except ConnectionError as error:
        return Answer(error=f"the connection broke off: {error}")
    finally:
        writer.transport.abort()
    return read_answer(b"".join(pieces))


def read_answer(received: bytes) -> Answer:
    """Of all that has come until the connection was closed. A body that lacks its last chunk is not done.

    >>> read_answer(b"HTTP/1.1 200 OK").error
    'the head is not whole'
    """
    head, end, rest = received.partition(b"\r\n\r\n")
    if not end:
        return Answer(error="the head is not whole")
    status = int(head.split(b" ", 2)[1])
    if status != 200:
        return Answer(error=f"status {status}: {rest.decode()}")
    answer = Answer()
    body, is_ended = joined_chunks(rest)
    *events, cut = body.split(b"\n\n")
    for event in events:
        answer.add(event.removeprefix(EVENT))
    answer.is_done &= is_ended and not cut
    return answer


def joined_chunks(coded: bytes) -> tuple[bytes, bool]:
    """The bytes of a chunked body, and whether its last chunk has come.

    >>> joined_chunks(bytes("2|ab|1|c|0||", "ascii").replace(b"|", bytes([13, 10])))
    (b'abc', True)
    """
    pieces: list[bytes] = []
    start = 0
    while (end := coded.find(b"\r\n", start)) >= 0:
        size = int(coded[start:end], 16)
        if size == 0:
            return b"".join(pieces), True
        pieces.append(coded[end + 2 : end + 2 + size])
        start = end + 2 + size + 2
    return b"".join(pieces), False
