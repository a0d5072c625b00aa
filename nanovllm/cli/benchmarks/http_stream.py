"""A client that reads a stream of server-sent events, and takes little time itself: it shares the machine's cores.

It speaks just enough HTTP for that. A library takes ten times as long for each event.
"""

import asyncio
import json
import ssl
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

DONE = "[DONE]"
MAX_LINE_BYTES = 1 << 24


class Broken(Exception):
    """What came is no answer, or not all of it."""


@dataclass(frozen=True)
class Target:
    """A server. Its address may have a path, which comes before those of the interface."""

    host: str
    port: int
    is_secure: bool
    path: str
    headers: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, url: str, api_key: str | None = None) -> "Target":
        """Raises ValueError for what is no address.

        >>> Target.of("http://localhost:8000/v1/").path, Target.of("https://some.where").port
        ('', 443)
        """
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError:
            raise ValueError(f"base_url {url!r} is no address") from None
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"base_url must be http://... or https://..., not {url!r}")
        is_secure = parts.scheme == "https"
        path = parts.path.rstrip("/").removesuffix("/v1")
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        return cls(parts.hostname, port or (443 if is_secure else 80), is_secure, path, headers)


@dataclass
class Answer:
    """Its head has come."""

    status: int
    headers: dict[str, str]
    reader: asyncio.StreamReader

    async def pieces(self) -> AsyncIterator[bytes]:
        """The body as it comes. Raises Broken if it ends before it is whole."""
        try:
            if "chunked" in self.headers.get("transfer-encoding", ""):
                while size := int((await self.reader.readline()).split(b";")[0], 16):
                    yield await self.reader.readexactly(size)
                    await self.reader.readexactly(2)
            elif (length := self.headers.get("content-length")) is not None:
                yield await self.reader.readexactly(int(length))
            else:
                while piece := await self.reader.read(1 << 16):
                    yield piece
        except (asyncio.IncompleteReadError, ValueError):
            raise Broken("the answer ends before it is whole") from None

    async def body(self) -> bytes:
        return b"".join([piece async for piece in self.pieces()])

    async def events(self) -> AsyncIterator[Any]:
        """What each event holds; the last is DONE, or the stream was not whole."""
        rest = b""
        async for piece in self.pieces():
            *whole, rest = (rest + piece).replace(b"\r\n", b"\n").split(b"\n\n")
            for event in whole:
                for line in event.split(b"\n"):
                    if line.startswith(b"data:"):
                        data = line[5:].strip()
                        yield DONE if data == b"[DONE]" else json.loads(data)


@asynccontextmanager
async def asked(target: Target, method: str, path: str, body: Any = None) -> AsyncIterator[Answer]:
    """The answer to a request on a connection of its own. Raises OSError, or Broken for what is no HTTP."""
    context = ssl.create_default_context() if target.is_secure else None
    reader, writer = await asyncio.open_connection(target.host, target.port, ssl=context, limit=MAX_LINE_BYTES)
    try:
        writer.write(request(target, method, path, body))
        yield Answer(*await read_head(reader), reader)
    finally:
        writer.transport.abort()  # whatever has not come yet is not wanted any more


def request(target: Target, method: str, path: str, body: Any) -> bytes:
    data = b"" if body is None else json.dumps(body).encode()
    headers = {
        "Host": f"{target.host}:{target.port}",
        "Content-Type": "application/json",
        "Content-Length": str(len(data)),
        "Connection": "close",
        **target.headers,
    }
    lines = [f"{method} {target.path}{path} HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items())]
    return "\r\n".join([*lines, "", ""]).encode() + data


async def read_head(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    try:
        first, *lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        version, status, *_ = first.split(" ")
        if not version.startswith("HTTP/1."):
            raise ValueError
        pairs = [line.partition(":") for line in lines if line]
        return int(status), {name.lower(): value.strip() for name, _, value in pairs}
    except (asyncio.IncompleteReadError, asyncio.LimitOverrunError, ValueError):
        raise Broken("there is no answer in HTTP") from None
