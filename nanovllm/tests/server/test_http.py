"""Clients that are slow, send too much, or send what is no HTTP."""

import asyncio
import json
import socket
from contextlib import suppress

import pytest

from ...server.checked_connection import MAX_SMALL_CHUNKS
from ...server.http_protocol import HttpProtocol
from .inside import inside, until
from .raw import exchange, post

GOOD = json.dumps({"prompt": [5, 6], "max_tokens": 2, "temperature": 0}).encode()
CHUNKED = post(b"", content_length="", transfer_encoding="chunked")
QUICK = {"header_timeout": 0.2, "body_timeout": 0.3, "max_body_bytes": 10_000}


def asked(checkpoint, *parts, options=QUICK, **how):
    """What comes back, and that another client is served meanwhile and afterwards."""

    async def scenario():
        async with inside(checkpoint, **options) as server:
            raw, other = await asyncio.gather(
                exchange(str(server.client.base_url), *parts, **how), server.post(prompt=[5, 6], max_tokens=2)
            )
            assert other.status_code == (await server.client.get("/health")).status_code == 200
            return raw

    return asyncio.run(scenario())


BROKEN = {
    "no HTTP": b"hello\r\n\r\n",
    "a TLS hello": bytes([0x16, 3, 1, 0, 200, 1]),
    "no version": b"GET /health\r\n\r\n",
    "a space in a header's name": b"GET /health HTTP/1.1\r\nhost : a\r\n\r\n",
    "no host": b"GET /health HTTP/1.1\r\n\r\n",
    "two lengths": b"POST /tokenize HTTP/1.1\r\nhost: a\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\n{}",
    "a length that is no number": post(b"{}", content_length="two"),
    "a negative length": post(b"{}", content_length="-2"),
    "an encoding of the transfer that nobody has": post(b"{}", content_length="", transfer_encoding="gzip"),
    "both a length and chunks": post(b"{}", transfer_encoding="chunked"),
    "a chunk whose size is no number": CHUNKED + b"zz\r\n{}\r\n0\r\n\r\n",
    "zeros": b"\x00" * 100,
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_http_is_told_in_openais_form(served, name):
    raw = asyncio.run(exchange(served.url, BROKEN[name]))
    assert raw.status == 400 and raw.is_closed is False and raw.seconds < 1
    assert raw.error["type"] == "invalid_request_error"
    assert raw.error["message"].startswith("the request cannot be taken: ")


@pytest.mark.parametrize(("size", "end"), [(100_000, b""), (33_000, b"\r\n\r\n")], ids=["not whole", "at once"])
def test_a_head_that_is_too_long(served, size, end):
    raw = asyncio.run(exchange(served.url, b"GET /health HTTP/1.1\r\nhost: a\r\nx: " + b"y" * size + end))
    assert raw.status == 431 and raw.error


@pytest.mark.parametrize("body", [post(GOOD, content_length="20000"), CHUNKED + b"1000\r\n" + b" " * 4096 + b"\r\n"])
def test_a_body_that_is_too_large(checkpoint, body):
    raw = asked(checkpoint, body, b"1000\r\n" + b" " * 4096 + b"\r\n" + b"1000\r\n" + b" " * 4096 + b"\r\n")
    assert raw.status == 413 and raw.seconds < 1
    assert "the limit is 10,000" in raw.error["message"]


def test_a_body_that_is_too_large_may_be_sent_to_its_end(checkpoint):
    """The client reads the answer although it goes on writing."""
    raw = asked(checkpoint, post(b" " * 3_000_000))
    assert raw.status == 413 and raw.error


def test_chunks_that_are_too_small(checkpoint):
    raw = asked(checkpoint, CHUNKED + b"1\r\n \r\n" * (MAX_SMALL_CHUNKS + 1))
    assert raw.status == 400 and "1.0 bytes on average" in raw.error["message"]


@pytest.mark.parametrize(
    ("part", "parts"),
    [
        ("head", [b"POST /v1/comp", 0.1, b"letions HT", 0.1, b"TP/1.1\r\n", 0.1, b"host: a\r\n"]),
        ("body", [post(GOOD, content_length="99"), 0.1, b" ", 0.1, b" ", 0.1, b" ", 0.1, b" "]),
        ("body", [CHUNKED, 0.1, b"2\r\n{", 0.1, b" "]),
    ],
)
def test_a_request_that_is_too_slow(checkpoint, part, parts):
    seconds = QUICK["header_timeout" if part == "head" else "body_timeout"]
    raw = asked(checkpoint, *parts)
    assert raw.status == 408 and seconds <= raw.seconds < seconds + 1
    assert raw.error["message"] == f"the {part} of the request took more than {seconds} seconds"


def test_a_client_that_says_nothing_is_told_nothing(checkpoint):
    raw = asked(checkpoint)
    assert (raw.received, raw.is_closed) == (b"", True)
    assert 0.1 < raw.seconds < 1, "0.2, by the clock of a server that has heard of the client a little earlier"


def test_a_second_request_has_a_clock_of_its_own(checkpoint):
    parts = [post(GOOD)[:-5], 0.1, post(GOOD)[-5:], 0.1, b"GET /health HTTP/1.1\r\n"]

    async def scenario():
        async with inside(checkpoint, **QUICK) as server:
            host, port = server.client.base_url.host, server.client.base_url.port
            reader, writer = await asyncio.open_connection(host, port)
            for part in parts:
                writer.write(part) if isinstance(part, bytes) else await asyncio.sleep(part)
            received = await asyncio.wait_for(reader.read(), 5)
            writer.close()
            return received

    received = asyncio.run(scenario())
    assert received.startswith(b"HTTP/1.1 200 ") and b"HTTP/1.1 408 " in received


def test_two_requests_at_once_get_two_answers(served):
    async def scenario():
        reader, writer = await asyncio.open_connection(*served.url.removeprefix("http://").split(":"))
        writer.write(post(b"{}") + post(b"[]").replace(b"host: test", b"host: test\r\nconnection: close"))
        received = await asyncio.wait_for(reader.read(), 5)
        writer.close()
        return received

    assert asyncio.run(scenario()).count(b"HTTP/1.1 400 ") == 2


def test_a_request_that_ends_before_it_is_whole(served):
    raw = asyncio.run(exchange(served.url, post(GOOD, content_length="99"), is_ended=True))
    assert raw.status == 400 and "before the request was whole" in raw.error["message"]


def test_a_client_that_goes_in_the_middle_of_its_body_is_no_error_of_the_server(checkpoint, capfd):
    async def scenario():
        async with inside(checkpoint, **QUICK) as server:
            host, port = server.client.base_url.host, server.client.base_url.port
            _, writer = await asyncio.open_connection(host, port)
            writer.write(post(GOOD, content_length="99"))
            await asyncio.sleep(0.05)
            writer.transport.abort()
            await asyncio.sleep(0.05)
            assert server.is_empty

    asyncio.run(scenario())
    assert "Traceback" not in capfd.readouterr().err


def test_a_client_that_does_not_read_is_let_go(checkpoint, monkeypatch):
    """Its blocks come free. The system keeps little for it here: else it would have to send nothing for megabytes."""
    made = HttpProtocol.connection_made

    def with_little_room(self, transport):
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        made(self, transport)

    monkeypatch.setattr(HttpProtocol, "connection_made", with_little_room)
    body = {"prompt": [5, 6], "max_tokens": 200, "n": 4, "logprobs": 5, "ignore_eos": True, "stream": True}

    async def scenario():
        async with inside(checkpoint, body_timeout=0.2) as server:
            client = socket.socket()
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.connect((server.client.base_url.host, server.client.base_url.port))
            client.sendall(post(json.dumps(body).encode()))
            await until(lambda: server.num_begun == 1)
            await until(lambda: server.front.state.engine.num_requests == 0 and server.is_empty, seconds=5)
            with client, suppress(ConnectionResetError):
                while part := client.recv(1 << 16):
                    assert b"[DONE]" not in part, "all of it was sent: nothing had to wait"

    asyncio.run(scenario())
