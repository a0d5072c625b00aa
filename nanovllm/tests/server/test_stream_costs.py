"""What a token of a stream costs beside its bytes: work is counted, not timed."""

import json
import subprocess
import sys
from collections import Counter

import h11
import pytest

from ...server import engine_process, generation
from ...server.engine_process import StepResult, TextDeltas
from ...server.limits import CheckedConnection
from ..testing.inside import LONG, inside, slow

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


REQUEST = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n"
OLD_REQUEST = b"POST / HTTP/1.0\r\nHost: x\r\nContent-Length: 0\r\n\r\n"


@pytest.mark.parametrize("request_bytes", [REQUEST, OLD_REQUEST])
@pytest.mark.parametrize("headers", [[], [(b"content-length", b"7")]])
def test_chunks_are_those_of_h11(request_bytes, headers):
    """In an order that a server sends them, and in a second response of the same connection."""
    connections = CheckedConnection(1000), h11.Connection(h11.SERVER)
    for _ in range(1 if request_bytes is OLD_REQUEST else 2):
        sent = []
        for connection in connections:
            connection.receive_data(request_bytes)
            while not isinstance(connection.next_event(), h11.EndOfMessage):
                pass
            data = [b"data: 1", b""] if headers else [b"data: 1", b"", b"more", b"x" * 300]
            events = [h11.Response(status_code=200, headers=headers), *(h11.Data(data=each) for each in data)]
            sent.append([connection.send(event) for event in (*events, h11.EndOfMessage())])
            if request_bytes is REQUEST:
                connection.start_next_cycle()
        assert [each or b"" for each in sent[0]] == [each or b"" for each in sent[1]]


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
