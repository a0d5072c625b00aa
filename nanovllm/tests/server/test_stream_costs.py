"""What a token of a stream costs beside its bytes: work is counted, not timed."""

import asyncio
import gc
import json
import random
import subprocess
import sys
import weakref
from collections import Counter, defaultdict

import h11
import pytest
import uvicorn
from starlette.applications import Starlette

from ...server import engine_process, generation
from ...server.engine_client import RunningRequests
from ...server.engine_process import Delta, Piece, StepResult, TextDeltas
from ...server.limits import HttpProtocol
from ...server.options import ServerOptions
from ...server.run import uvicorn_config
from ..testing.inside import LONG, inside, slow, until

pytestmark = pytest.mark.anyio

CHAT = {"messages": [{"role": "user", "content": "the fox"}], "max_tokens": 50, "ignore_eos": True, "temperature": 0}


@pytest.fixture
def calls(monkeypatch):
    """Count the chunks that are built as objects, and the deltas that are sent as text or as objects."""
    counts = Counter[str]()
    event_of, send = generation.event_of, engine_process.send

    def count_event(value, *name):
        counts["chunks"] += 1
        return event_of(value, *name)

    def count_deltas(pipe, message):
        if isinstance(message, StepResult):
            counts["texts"] += len(message.texts.request_ids)
            counts["deltas"] += len(message.deltas)
        return send(pipe, message)

    monkeypatch.setattr(generation, "event_of", count_event)
    monkeypatch.setattr(engine_process, "send", count_deltas)
    return counts


async def streamed(server, path, body):
    async with server.client.stream("POST", path, json={**body, "stream": True}) as response:
        lines = [line.removeprefix("data: ") async for line in response.aiter_lines() if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


@pytest.mark.parametrize(("path", "body"), [("/v1/completions", LONG), ("/v1/chat/completions", CHAT)])
async def test_a_token_is_no_object_and_its_chunk_is_like_one(path, body, checkpoint, calls):
    async with inside(checkpoint, slow) as server:
        chunks = await streamed(server, path, body)
        assert len(chunks) >= 50 and calls["chunks"] <= 5, "the first two, the last one, and a frame"
        assert calls["deltas"] <= 2 and calls["texts"] >= 48
        calls.clear()
        whole = await streamed(server, path, {**body, "stream_options": {"continuous_usage_stats": True}})
        assert calls["chunks"] == len(whole), "these have numbers"
    for chunk in whole:
        del chunk["usage"]
    for chunk in chunks + whole:
        del chunk["id"], chunk["created"]
    assert chunks == whole


async def test_samples_and_logprobs_are_sent_as_objects(checkpoint, calls):
    async with inside(checkpoint, slow) as server:
        for more in ({"n": 2}, {"logprobs": 1}, {"return_token_ids": True}):
            calls.clear()
            chunks = await streamed(server, "/v1/completions", {**LONG, **more})
            has_objects = calls["deltas"] >= 48 if "return_token_ids" not in more else calls["chunks"] == len(chunks)
            assert has_objects, more


@pytest.mark.parametrize("text", ["", "a", 'quotes " and \\', "line\nbreak", "\0 \x1f", "ß 火 🔥", "</script>"])
async def test_any_text_is_framed_as_in_a_whole_chunk(text):
    frame = generation.event_of({"choices": [{"index": 0, "text": generation.MARK, "logprobs": None}], "id": "x"})
    before, after = frame.split(generation.to_json(generation.MARK).encode())
    expected = generation.event_of({"choices": [{"index": 0, "text": text, "logprobs": None}], "id": "x"})
    assert before + generation.to_json(text).encode() + after == expected


def test_columns_give_the_deltas_of_their_rows():
    texts = TextDeltas(["a", "b"], ["x", ""], [[1], [2, 3]], [0, 16])
    first, second = texts.rows()
    assert (first.request_id, first.finished, first.num_cached_tokens) == ("a", False, 0)
    assert [(each.text, each.token_ids, each.finish_reason) for each in second.pieces] == [("", [2, 3], None)]


# The short way from the engine to a connection


@pytest.fixture
def written(monkeypatch):
    """Record the chunks that take the short way."""
    chunks, write = [], HttpProtocol.write

    def record(connection, data):
        chunks.append(data)
        write(connection, data)

    monkeypatch.setattr(HttpProtocol, "write", record)
    return chunks


def shown(events):
    """Return the whole text of each choice of a stream."""
    texts = defaultdict[int, str](str)
    for event in events:
        for choice in event.get("choices", []):
            texts[choice["index"]] += choice.get("text") or choice.get("delta", {}).get("content") or ""
        if event.get("type") == "response.output_text.delta":
            texts[0] += event["delta"]
    return texts


RESPONSE = {"input": "the fox", "max_output_tokens": 50, "ignore_eos": True, "temperature": 0}
STREAMS = [
    ("/v1/completions", LONG),
    ("/v1/completions", {**LONG, "n": 2, "logprobs": 1}),
    ("/v1/completions", {**LONG, "prompt": ["the fox", "a cat"], "stream_options": {"continuous_usage_stats": True}}),
    ("/v1/chat/completions", CHAT),
    ("/v1/chat/completions", {**CHAT, "tools": [{"type": "function", "function": {"name": "add"}}]}),
    ("/v1/responses", RESPONSE),
]


@pytest.mark.parametrize(("path", "body"), STREAMS)
async def test_streams_are_the_same_on_both_ways(path, body, checkpoint, written, monkeypatch):
    """A client that now and then doesn't read gets several tokens at once, and nothing is lost or out of order."""
    rng, can_write, streams = random.Random(0), HttpProtocol.can_write, []
    async with inside(checkpoint, slow) as server:
        for share in (0.0, 0.5, 1.0):
            monkeypatch.setattr(HttpProtocol, "can_write", lambda self, s=share: rng.random() < s and can_write(self))
            written.clear()
            async with server.client.stream("POST", path, json={**body, "stream": True}) as response:
                lines = [line[6:] async for line in response.aiter_lines() if line.startswith("data: {")]
            streams.append([json.loads(line) for line in lines])
            num_written = sum(chunk.count(b"data: {") for chunk in written)
            assert share > 0 or num_written == 0
    assert 36 * len(shown(streams[0])) <= num_written < len(lines), "all but the first ones and the last"
    assert len(streams[1]) <= len(streams[0]) == len(streams[2])
    assert shown(streams[0]) == shown(streams[1]) == shown(streams[2]) != {}


@pytest.mark.parametrize("version", ["0.9", "1.0", "1.1"])
async def test_chunks_are_those_of_the_http_version(version, checkpoint, written):
    body = json.dumps({**LONG, "stream": True}).encode()
    head = f"POST /v1/completions HTTP/{version}\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    async with inside(checkpoint, slow) as server:
        url = server.client.base_url
        reader, writer = await asyncio.open_connection(url.host, url.port)
        writer.write(f"{head}Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode() + body)
        received = await reader.read()
        writer.close()
    connection = h11.Connection(h11.CLIENT)
    connection.send(h11.Request(method="POST", target="/", headers=[("Host", "x")]))
    connection.send(h11.EndOfMessage())
    connection.receive_data(received)
    connection.receive_data(b"")
    events = list(iter(connection.next_event, h11.EndOfMessage()))
    text = b"".join(bytes(event.data) for event in events if isinstance(event, h11.Data)).decode()
    pieces = [json.loads(line[6:])["choices"][0]["text"] for line in text.split("\n\n") if line.startswith("data: {")]
    assert len(pieces) == 50 and text.endswith("data: [DONE]\n\n")
    assert (len(written) > 40) == (version == "1.1"), "a client of an older HTTP knows no chunks"


async def test_refused_client_gets_no_more_tokens(checkpoint, monkeypatch):
    """Its next request was cut off while a stream ran. The server has ended the connection: a write would raise."""
    could_write, eof_received = [], HttpProtocol.eof_received

    def record(connection):
        could_write.append(connection.can_write())
        eof_received(connection)
        could_write.append(connection.can_write())

    monkeypatch.setattr(HttpProtocol, "eof_received", record)
    async with inside(checkpoint, slow) as server:
        reader, writer = await asyncio.open_connection(server.client.base_url.host, server.client.base_url.port)
        body = json.dumps({**LONG, "stream": True})
        head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}"
        writer.write(f"{head}\r\nContent-Type: application/json\r\n\r\n{body}POST /v1".encode())
        await reader.readuntil(b"data: ")
        writer.write_eof()
        assert b"[DONE]" not in await reader.read()
        writer.close()
        await until(lambda: server.is_empty)
    assert could_write == [True, False]


async def test_error_on_the_short_way_ends_one_stream(checkpoint, monkeypatch):
    broken, add = [], generation.ChunkBuilder.add

    def add_or_raise(builder, index, is_first, piece):
        if not is_first and len(broken) < 3:
            broken.append(builder)
        if builder in broken[2:]:
            raise RuntimeError("a fault")
        return add(builder, index, is_first, piece)

    monkeypatch.setattr(generation.ChunkBuilder, "add", add_or_raise)
    async with inside(checkpoint, slow) as server:

        async def lines():
            async with server.client.stream("POST", "/v1/completions", json={**LONG, "stream": True}) as response:
                return [line async for line in response.aiter_lines() if line]

        ends = sorted([each[-1] for each in await asyncio.gather(lines(), lines())])
        await until(lambda: server.is_empty)
    assert ends[0] == "data: [DONE]" and "Internal Server Error" in ends[1]


async def test_stream_ends_as_soon_as_a_sample_fails(checkpoint):
    """The other sample goes on, so the output with the error isn't the request's last one."""

    def prepare(engine):
        slow(engine)
        run = engine.executor.run

        def run_or_raise(batch):
            if any(seq.sample_index == 1 and seq.num_output_tokens == 5 for seq, _ in batch):
                raise RuntimeError("a fault")
            return run(batch)

        engine.executor.run = run_or_raise

    async with inside(checkpoint, prepare) as server:
        body = {**LONG, "n": 2, "stream": True}
        async with server.client.stream("POST", "/v1/completions", json=body) as response:
            lines = [line async for line in response.aiter_lines() if line]
        await until(lambda: server.is_empty)
    assert "The request failed: RuntimeError." in lines[-1] and len(lines) < 20


async def test_connection_is_freed_without_the_garbage_collector():
    """A busy server holds full collections back, and connections come and go."""
    options = ServerOptions()
    connection = HttpProtocol(uvicorn_config(Starlette(), options), uvicorn.server.ServerState(), {}, limits=options)
    reference = weakref.ref(connection)
    assert not connection.app_state["connection"].can_write(), "no stream has begun"
    gc.disable()
    del connection
    is_freed = reference() is None
    gc.enable()
    assert is_freed


async def test_delta_is_written_only_if_all_before_it_was_sent():
    written = []
    running = RunningRequests(1, {"a": 3}, lambda delta: written.append(delta) or True)

    def delta(token, is_last=False):
        return Delta("a", [Piece(0, "", [token], None, None, None)], is_last, 0)

    async def take():
        return [piece.token_ids for each in await running.get() for piece in each.pieces]

    running.put(delta(1))  # nobody waits for it
    running.put(delta(2))
    assert written == [] and running.num_waiting_tokens == {}
    assert await take() == [[1, 2]]
    waiting = asyncio.create_task(take())
    await asyncio.sleep(0)
    running.put(delta(3))
    assert written == [delta(3)]
    running.put(delta(4, is_last=True))  # the task must notice the end
    running.put(delta(5))  # comes after the last one, which is not sent yet
    assert await waiting == [[4, 5]] and written == [delta(3)]


def test_a_full_collection_waits_until_there_is_no_work():
    code = """
import gc
from nanovllm.server import collector

def full(): return gc.get_stats()[2]["collections"]
def work(): return [[[] for _ in range(1000)] for _ in range(1000)]  # a million objects that stay

before = full()
kept = work()
print(full() - before)
collector.hold_back()
before = full()
kept += work()
print(full() - before)
collector.catch_up()
print(full() - before)
collector.catch_up()
print(full() - before)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    by_default, while_working, idle, again = map(int, done.stdout.split())
    assert by_default > 0 and (while_working, idle, again) == (0, 1, 1)
