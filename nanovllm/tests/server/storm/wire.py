"""Streamed completions as bytes over a connection: a broken stream must never look complete."""

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from urllib.parse import urlsplit

EVENT = b"data: "


class StreamRequest(NamedTuple):
    """A request for a stream."""

    path: str
    body: str  # JSON

    @property
    def value(self) -> dict[str, Any]:
        return json.loads(self.body)

    def head(self) -> bytes:
        headers = f"content-type: application/json\r\ncontent-length: {len(self.body)}\r\nconnection: close"
        return f"POST {self.path} HTTP/1.1\r\nhost: localhost\r\n{headers}\r\n\r\n".encode()


@dataclass
class StreamResult:
    """The contents of a stream."""

    texts: dict[int, str] = field(default_factory=dict)  # by choice
    reasons: dict[int, str] = field(default_factory=dict)
    is_done: bool = False  # it ended with [DONE]
    error: str | None = None

    @property
    def is_whole(self) -> bool:
        """True if each choice has a finish reason, and the stream ended with [DONE]."""
        return self.is_done and self.error is None and bool(self.texts) and self.texts.keys() == self.reasons.keys()

    @property
    def outputs(self) -> dict[int, tuple[str, str]]:
        """The text and the finish reason of each choice."""
        return {index: (text, self.reasons[index]) for index, text in sorted(self.texts.items())}

    def add(self, data: bytes) -> None:
        """Add the data of an event."""
        assert not self.is_done, f"{data!r} follows [DONE]"
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


async def send_and_read(
    url: str, request: StreamRequest, on_piece: Callable[[bytes], None] = lambda received: None
) -> StreamResult:
    """Send a request and read its stream until the connection closes. Call `on_piece` with each piece of bytes."""
    reader, writer = await asyncio.open_connection(*address_of(url))
    try:
        writer.write(request.head() + request.body.encode())
        pieces = []
        while piece := await reader.read(1 << 16):
            pieces.append(piece)
            on_piece(piece)
    except ConnectionError as error:
        return StreamResult(error=f"the connection broke: {error}")
    finally:
        writer.transport.abort()
    return read_stream(b"".join(pieces))


def read_stream(received: bytes) -> StreamResult:
    """Return the contents of a stream. Without its last chunk it is not done.

    >>> read_stream(b"HTTP/1.1 200 OK").error
    'the head is incomplete'
    """
    head, end, payload = received.partition(b"\r\n\r\n")
    if not end:
        return StreamResult(error="the head is incomplete")
    status = int(head.split(b" ", 2)[1])
    if status != 200:
        return StreamResult(error=f"status {status}: {payload.decode()}")
    result = StreamResult()
    body, is_ended = joined_chunks(payload)
    *events, rest = body.split(b"\n\n")
    for event in events:
        result.add(event.removeprefix(EVENT))
    result.is_done &= is_ended and not rest
    return result


def joined_chunks(encoded: bytes) -> tuple[bytes, bool]:
    """Return the bytes of a chunked body, and whether it has its last chunk.

    >>> joined_chunks(bytes("2|ab|1|c|0||", "ascii").replace(b"|", bytes([13, 10])))
    (b'abc', True)
    """
    pieces: list[bytes] = []
    start = 0
    while (end := encoded.find(b"\r\n", start)) >= 0:
        size = int(encoded[start:end], 16)
        if size == 0:
            return b"".join(pieces), True
        pieces.append(encoded[end + 2 : end + 2 + size])
        start = end + 2 + size + 2
    return b"".join(pieces), False
