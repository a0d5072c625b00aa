"""Bytes over a TCP connection, for requests that no HTTP library would send."""

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple
from urllib.parse import urlsplit

CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


class Raw(NamedTuple):
    """The bytes that came back until the server closed the connection, or the response was complete."""

    received: bytes
    seconds: float
    is_closed: bool

    @property
    def status(self) -> int | None:
        """The status of the first response, if there is one."""
        return int(self.received.split(b" ", 2)[1]) if self.received.startswith(b"HTTP/1.1 ") else None

    @property
    def body(self) -> bytes:
        """The body of the first response."""
        head, _, body = self.received.partition(b"\r\n\r\n")
        return body[: length_of(head)]

    @property
    def error(self) -> dict[str, Any]:
        """The error of a response in OpenAI's form, {"error": {"message", "type", "param", "code"}}."""
        value = json.loads(self.body)
        assert set(value) == {"error"} and set(value["error"]) == {"message", "type", "param", "code"}, value
        assert isinstance(value["error"]["message"], str) and value["error"]["message"], value
        return value["error"]


Pause = Callable[[float], Awaitable[None]]


async def exchange(
    url: str, *parts: bytes | float, is_ended: bool = False, seconds: float = 600.0, pause: Pause | None = None
) -> Raw:
    """Send the parts, call `pause` where a part is a number of seconds, and read the response.

    `is_ended` closes the sending side. A response is complete once its Content-Length has arrived.
    """
    address = urlsplit(url)
    reader, writer = await asyncio.open_connection(address.hostname, address.port)
    start = time.monotonic()
    received, is_closed = b"", False
    try:
        sending = asyncio.ensure_future(send(writer, parts, is_ended, pause))
        async with asyncio.timeout(seconds):
            while not is_whole(received):
                piece = await reader.read(1 << 16)
                if not piece:
                    is_closed = True
                    break
                received = (received + piece).removeprefix(CONTINUE)
    except ConnectionError:
        is_closed = True
    except TimeoutError:
        is_closed = False
    finally:
        sending.cancel()
        writer.close()
    return Raw(received, time.monotonic() - start, is_closed)


async def send(
    writer: asyncio.StreamWriter, parts: tuple[bytes | float, ...], is_ended: bool, pause: Pause | None
) -> None:
    try:
        for part in parts:
            if isinstance(part, bytes):
                writer.write(part)
                await writer.drain()
            elif pause:
                await pause(part)
        if is_ended:
            writer.write_eof()
    except ConnectionError:
        pass  # the server has closed the connection


def is_whole(received: bytes) -> bool:
    head, end, body = received.partition(b"\r\n\r\n")
    length = length_of(head)
    return bool(end) and length is not None and len(body) >= length


def length_of(head: bytes) -> int | None:
    """Return the Content-Length of a head."""
    lengths = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
    return int(lengths[0].split(b":")[1]) if lengths else None


def post(body: bytes, path: str = "/v1/completions", **headers: str) -> bytes:
    """Return a whole request. A header set to "" is left out, and a_b becomes A-B."""
    fields = {"host": "localhost", "content_type": "application/json", "content_length": str(len(body))} | headers
    lines = [f"POST {path} HTTP/1.1", *(f"{name.replace('_', '-')}: {each}" for name, each in fields.items() if each)]
    return "\r\n".join([*lines, "", ""]).encode() + body
