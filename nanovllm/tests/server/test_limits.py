"""Limits: slow clients, large and broken requests, and more requests than the server accepts."""

import asyncio
import json
import socket
from contextlib import suppress

import pytest

from ...server.limits import MIN_CHUNK_BYTES, HttpProtocol
from ..testing.inside import LONG, SHORT, error_of, inside, slow, until
from ..testing.loop_clock import forward, turn
from ..testing.raw_http import Raw, exchange, is_whole, post
from .storm.wire import address_of

pytestmark = pytest.mark.anyio

GOOD = json.dumps({"prompt": [5, 6], "max_tokens": 2, "temperature": 0}).encode()
CHUNKED = post(b"", content_length="", transfer_encoding="chunked")
SMALL = {
    "max_body_bytes": 10_000,
    "header_timeout": 100.0,
    "body_timeout": 150.0,
}  # by the loop's clock, which the tests move


async def received_for(checkpoint, *parts):
    """Return the response, and check that another client is served during and after it."""
    async with inside(checkpoint, **SMALL) as server:
        raw, other = await asyncio.gather(
            exchange(str(server.client.base_url), *parts), server.post(prompt=[5, 6], max_tokens=2)
        )
        assert other.status_code == (await server.client.get("/health")).status_code == 200
        return raw


BROKEN = {
    "not HTTP": b"hello\r\n\r\n",
    "a TLS hello": bytes([0x16, 3, 1, 0, 200, 1]),
    "no version": b"GET /health\r\n\r\n",
    "a space in the name of a header": b"GET /health HTTP/1.1\r\nhost : a\r\n\r\n",
    "no host": b"GET /health HTTP/1.1\r\n\r\n",
    "two lengths": b"POST /tokenize HTTP/1.1\r\nhost: a\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\n{}",
    "a length that is not a number": post(b"{}", content_length="two"),
    "a negative length": post(b"{}", content_length="-2"),
    "an unknown transfer encoding": post(b"{}", content_length="", transfer_encoding="gzip"),
    "both a length and chunks": post(b"{}", transfer_encoding="chunked"),
    "a chunk whose size is not a number": CHUNKED + b"zz\r\n{}\r\n0\r\n\r\n",
    "zeros": b"\x00" * 100,
}


@pytest.mark.parametrize("name", BROKEN)
async def test_broken_http_gets_an_error_in_openai_form(served, name):
    raw = await exchange(served.url, BROKEN[name])
    assert raw.status == 400 and raw.is_closed is False
    assert raw.error["type"] == "invalid_request_error"
    assert raw.error["message"].startswith("We could not read the HTTP request: ")


async def test_head_that_is_too_long(served):
    raw = await exchange(served.url, b"GET /health HTTP/1.1\r\nhost: a\r\nx: " + b"y" * 300_000)
    assert raw.status == 431 and raw.error


@pytest.mark.parametrize("body", [post(GOOD, content_length="20000"), CHUNKED + b"1000\r\n" + b" " * 4096 + b"\r\n"])
async def test_body_that_is_too_large(checkpoint, body):
    raw = await received_for(
        checkpoint, body, b"1000\r\n" + b" " * 4096 + b"\r\n" + b"1000\r\n" + b" " * 4096 + b"\r\n"
    )
    assert raw.status == 413
    assert "at most 10,000 are allowed" in raw.error["message"]


async def test_client_may_send_the_rest_of_a_refused_body(checkpoint):
    """The client reads the error although it is still writing."""
    raw = await received_for(checkpoint, post(b" " * 3_000_000))
    assert raw.status == 413 and raw.error


async def test_tiny_chunks_count_as_larger_ones(checkpoint):
    raw = await received_for(checkpoint, CHUNKED + b"1\r\n \r\n" * (SMALL["max_body_bytes"] // MIN_CHUNK_BYTES + 1))
    assert raw.status == 413 and raw.error


async def read_all(server, *parts):
    """Send the parts, move the clock where a part is a number of seconds, and return all that the server sends.

    Check that other clients are served in the meantime, and that the connection is open until the last part.
    """
    reader, writer = await asyncio.open_connection(*address_of(str(server.client.base_url)))
    await until(lambda: len(server.front.servers[0].server_state.connections) > 0)
    reading = asyncio.create_task(reader.read())
    for part in parts:
        assert not reading.done(), "the server has closed the connection"
        if isinstance(part, bytes):
            await server.read(writer, part)
            assert (await server.client.get("/health")).status_code == 200
        else:
            forward(part)
            await turn()
    received = await reading
    writer.close()
    assert (await server.client.get("/health")).status_code == 200
    return received


@pytest.mark.parametrize(
    ("part", "parts"),
    [
        ("head", [b"POST /v1/comp", 45.0, b"letions HT", 45.0, b"TP/1.1\r\n", 20.0]),
        ("body", [post(GOOD, content_length="99"), 70.0, b" ", 70.0, b" ", 20.0]),
        ("body", [CHUNKED, 70.0, b"2\r\n{", 70.0, b" ", 20.0]),
    ],
)
async def test_request_that_is_too_slow(checkpoint, part, parts):
    async with inside(checkpoint, **SMALL) as server:
        received = await read_all(server, *parts)
    seconds = SMALL["header_timeout" if part == "head" else "body_timeout"]
    raw = Raw(received, 0.0, True)
    assert (
        raw.status == 408 and raw.error["message"] == f"The {part} of the request took more than {seconds:g} seconds."
    )


async def test_silent_connection_is_closed_without_a_response(checkpoint):
    async with inside(checkpoint, **SMALL) as server:
        assert await read_all(server, 90.0, 20.0) == b""


async def test_second_request_has_its_own_timeout(checkpoint):
    async with inside(checkpoint, **SMALL) as server:
        reader, writer = await asyncio.open_connection(*address_of(str(server.client.base_url)))
        await server.read(writer, post(GOOD)[:-5])
        forward(140.0)
        await server.read(writer, post(GOOD)[-5:])
        assert (await response(reader)).startswith(b"HTTP/1.1 200 ")
        await server.read(writer, b"GET /health HTTP/1.1\r\n")
        forward(90.0)
        await server.read(writer, b"host: a\r\n")
        forward(20.0)
        assert (await reader.read()).startswith(b"HTTP/1.1 408 ")
        writer.close()


async def test_head_that_begins_before_the_previous_response_has_its_own_timeout(checkpoint):
    async with inside(checkpoint, slow, **SMALL) as server:
        reader, writer = await asyncio.open_connection(*address_of(str(server.client.base_url)))
        await server.read(writer, post(GOOD) + b"GET /health HTTP/1.1\r\n")
        assert (await response(reader)).startswith(b"HTTP/1.1 200 ")
        forward(110.0)
        assert (await reader.read()).startswith(b"HTTP/1.1 408 ")
        writer.close()


async def response(reader):
    """Return the next response."""
    received = b""
    while not is_whole(received):
        part = await reader.read(1 << 16)
        assert part, received
        received += part
    return received


async def test_pipelined_requests_get_two_responses(served):
    last = post(b"[]").replace(b"host: localhost", b"host: localhost\r\nconnection: close")
    reader, writer = await asyncio.open_connection(*address_of(served.url))
    writer.write(post(b"{}") + last)
    assert (await reader.read()).count(b"HTTP/1.1 400 ") == 2
    writer.close()


async def test_request_that_ends_early(served):
    raw = await exchange(served.url, post(GOOD, content_length="99"), is_ended=True)
    assert raw.status == 400 and "before the request was complete" in raw.error["message"]


async def test_hang_up_within_a_body_prints_no_traceback(checkpoint, capfd):
    async with inside(checkpoint, **SMALL) as server:
        _, writer = await asyncio.open_connection(*address_of(str(server.client.base_url)))
        await server.read(writer, post(GOOD, content_length="99"))
        writer.transport.abort()
        await until(lambda: not server.front.servers[0].server_state.connections)
        assert server.is_empty
    assert "Traceback" not in capfd.readouterr().err


async def test_client_that_does_not_read_is_disconnected(checkpoint, monkeypatch):
    """Its blocks are freed. Small socket buffers make the server wait early."""
    connection_made, pause_writing, paused = HttpProtocol.connection_made, HttpProtocol.pause_writing, []

    def with_small_buffer(self, transport):
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        connection_made(self, transport)

    monkeypatch.setattr(HttpProtocol, "connection_made", with_small_buffer)
    monkeypatch.setattr(HttpProtocol, "pause_writing", lambda self: (pause_writing(self), paused.append(self)))
    body = {"prompt": [5, 6], "max_tokens": 200, "n": 4, "logprobs": 5, "ignore_eos": True, "stream": True}
    async with inside(checkpoint, body_timeout=100.0) as server:
        client = socket.socket()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(address_of(str(server.client.base_url)))
        client.sendall(post(json.dumps(body).encode()))
        await until(lambda: paused != [])
        forward(110.0)
        await until(lambda: server.front.state.engine.num_requests == 0 and server.is_empty)
        with client, suppress(ConnectionResetError):
            while part := client.recv(1 << 16):
                assert b"[DONE]" not in part, "the whole response was sent, so nothing had to wait"


# The load of the engine


async def test_more_requests_than_the_queue_takes(checkpoint):
    async with inside(checkpoint, slow, max_num_queued_reqs=4) as server:
        running = asyncio.create_task(server.post(**LONG, n=3))
        await until(lambda: server.front.state.engine.num_samples == 3)
        response = await server.post(**SHORT, n=2)
        error = error_of(response, 429)
        assert response.headers["retry-after"] == "1" and error["code"] == "rate_limit_exceeded"
        assert "3 requests" in error["message"] and "2 more would exceed max_num_queued_reqs" in error["message"]
        assert (await server.post(**SHORT)).status_code == 200
        assert (await running).status_code == 200
        assert (await server.post(**SHORT, n=2)).status_code == 200 and server.front.state.engine.num_samples == 0
        metrics = (await server.client.get("/metrics")).text
        assert 'vllm:admission_rejections_total{model_name="' in metrics
        assert 'reason="max_num_queued_reqs"} 1.0' in metrics and 'reason="max_num_queued_tokens"} 0.0' in metrics


async def test_more_tokens_than_the_queue_takes(checkpoint):
    async with inside(checkpoint, lambda engine: (slow(engine), slow(engine)), max_num_queued_tokens=40) as server:
        engine = server.front.state.engine
        first = asyncio.create_task(server.post(**{**SHORT, "prompt": [5] * 40}))
        await until(lambda: engine.num_requests == 1)
        assert engine.num_waiting_tokens == 40
        error = error_of(await server.post(**SHORT), 429)
        assert error["message"] == "Prompts of 40 tokens are waiting, and max_num_queued_tokens is 40."
        assert (await first).status_code == 200
        assert (await server.post(**SHORT)).status_code == 200


async def test_request_with_too_many_tokens(checkpoint):
    async with inside(checkpoint, max_request_tokens=100) as server:
        error = error_of(await server.post(**{**SHORT, "n": 3, "max_tokens": 40}), 400)
        assert "126 tokens" in error["message"] and "allows 100" in error["message"]
        assert (await server.post(**{**SHORT, "n": 2, "max_tokens": 40})).status_code == 200
        error_of(await server.post(**{**SHORT, "prompt": [[5]] * 50, "n": 50, "max_tokens": 0}), 400)


async def test_request_with_too_many_choices(checkpoint):
    async with inside(checkpoint) as server:
        error = error_of(await server.post(prompt=[5, 6], max_tokens=1, n=2049), 400)
        assert error["param"] == "n" and "2,049 choices" in error["message"] and "2,048" in error["message"]
