"""What goes over the wire, as it is: for clients that no library would be."""

import asyncio
import json
import time
from typing import Any, NamedTuple
from urllib.parse import urlsplit

CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"  # not yet an answer


class Raw(NamedTuple):
    """What came back until the server closed the connection, or until nothing more came."""

    received: bytes
    seconds: float
    is_closed: bool

    @property
    def status(self) -> int | None:
        """None if nothing came back."""
        return int(self.received.split(b" ", 2)[1]) if self.received.startswith(b"HTTP/1.1 ") else None

    @property
    def body(self) -> bytes:
        """Of the first answer, if there are more."""
        head, _, body = self.received.partition(b"\r\n\r\n")
        return body[: length_of(head)]

    @property
    def error(self) -> dict[str, Any]:
        """As OpenAI has it: {"error": {"message", "type", "param", "code"}} and nothing else."""
        value = json.loads(self.body)
        assert set(value) == {"error"} and set(value["error"]) == {"message", "type", "param", "code"}, value
        assert isinstance(value["error"]["message"], str) and value["error"]["message"], value
        return value["error"]


async def exchange(url: str, *parts: bytes | float, is_ended: bool = False, seconds: float = 5.0) -> Raw:
    """Send the parts, wait where a part is a number of seconds, and read what comes. `is_ended`: say that all was sent.

    A server that keeps the connection open has answered when its Content-Length is there.
    """
    address = urlsplit(url)
    reader, writer = await asyncio.open_connection(address.hostname, address.port)
    start = time.monotonic()
    received, is_closed = b"", False
    try:
        sending = asyncio.ensure_future(send(writer, parts, is_ended))
        async with asyncio.timeout(seconds):
            while not is_whole(received):
                piece = await reader.read(1 << 16)
                if not piece:
                    is_closed = True
                    break
                received = (received + piece).removeprefix(CONTINUE)
    except (ConnectionError, TimeoutError):
        is_closed = time.monotonic() - start < seconds
    finally:
        sending.cancel()
        writer.close()
    return Raw(received, time.monotonic() - start, is_closed)


async def send(writer: asyncio.StreamWriter, parts: tuple[bytes | float, ...], is_ended: bool) -> None:
    try:
        for part in parts:
            if isinstance(part, bytes):
                writer.write(part)
                await writer.drain()
            else:
                await asyncio.sleep(part)
        if is_ended:
            writer.write_eof()
    except ConnectionError:
        pass  # the server has said enough


def is_whole(received: bytes) -> bool:
    head, end, body = received.partition(b"\r\n\r\n")
    length = length_of(head)
    return bool(end) and length is not None and len(body) >= length


def length_of(head: bytes) -> int | None:
    """What it says of the body's."""
    lengths = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
    return int(lengths[0].split(b":")[1]) if lengths else None


def post(body: bytes, path: str = "/v1/completions", **headers: str) -> bytes:
    """A whole request; a header set to "" is left out, and one written a_b is A-B."""
    told = {"host": "test", "content_type": "application/json", "content_length": str(len(body))} | headers
    lines = [f"POST {path} HTTP/1.1", *(f"{name.replace('_', '-')}: {each}" for name, each in told.items() if each)]
    return "\r\n".join([*lines, "", ""]).encode() + body
