"""nanovllm bench serve, against a tiny server of another make and against this one."""

import asyncio
import json
import math
import threading
from contextlib import contextmanager
from itertools import pairwise

import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.responses import JSONResponse, PlainTextResponse, StreamingResponse
from starlette.routing import Route

from ...__main__ import main
from ...cli.benchmarks import serve_load
from ...cli.benchmarks.http_stream import Target
from ...server.addresses import listening_socket

FOUND = ("--num-prompts", "6", "--input-len", "4", "--output-len", "3")


class Other:
    """A server with answers like OpenAI's own: no field of ours, pauses that are known."""

    def __init__(self) -> None:
        self.bodies: list[dict] = []
        self.keys: set[str] = set()
        self.most = self.running = 0
        self.cut_after: int | None = None  # pieces

    async def models(self, request):
        self.keys.add(request.headers.get("authorization"))
        return JSONResponse({"data": [{"id": "other"}]})

    async def create(self, request):
        body = await request.json()
        self.bodies.append(body)
        if body["model"] != "other":
            return PlainTextResponse("no such model", 404)
        return StreamingResponse(self.events(body, "chat" in request.url.path), media_type="text/event-stream")

    async def events(self, body, is_chat):
        self.running += 1
        self.most = max(self.most, self.running)
        await asyncio.sleep(0.05)
        if is_chat:
            yield self.event(delta={"role": "assistant", "content": ""}, finish_reason=None)
        for i in range(body["max_tokens"]):
            if i == self.cut_after:
                self.running -= 1
                return
            text = {"delta": {"content": "a"}} if is_chat else {"text": "a"}
            yield self.event(**text, finish_reason=None)
            await asyncio.sleep(0.02)
        yield self.event(**({"delta": {}} if is_chat else {"text": ""}), finish_reason="length")
        usage = {"prompt_tokens": 4, "completion_tokens": body["max_tokens"]}
        yield f"data: {json.dumps({'choices': [], 'usage': usage})}\r\n\r\n"
        self.running -= 1
        yield "data: [DONE]\n\n"

    def event(self, **choice):
        return f"data: {json.dumps({'choices': [choice]})}\n\n"


@contextmanager
def other_server(other: Other):
    routes = [
        Route("/some/path/v1/models", other.models),
        Route("/some/path/v1/completions", other.create, methods=["POST"]),
        Route("/some/path/v1/chat/completions", other.create, methods=["POST"]),
    ]
    with listening_socket("127.0.0.1", 0) as listener:
        listener.listen()  # the thread below may come late to it
        server = uvicorn.Server(uvicorn.Config(Starlette(routes=routes), log_level="error", lifespan="off"))
        thread = threading.Thread(target=server.run, args=([listener],))
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}/some/path/v1"
        finally:
            server.should_exit = True
            thread.join()


@pytest.fixture
def bench(capsys, tmp_path):
    """bench("--flags") is (exit status, numbers or None, what was printed, errors)."""

    def command(*flags):
        file = tmp_path / "found.json"
        status = main(["bench", "serve", "--json", str(file), *flags])
        text = file.read_text()
        return status, json.loads(text) if text else None, *capsys.readouterr()

    return command


@pytest.mark.parametrize("endpoint", ["completions", "chat"])
def test_another_server(bench, endpoint):
    other = Other()
    with other_server(other) as url:
        flags = ("--base-url", url, "--endpoint", endpoint, "--max-concurrency", "3", "--api-key", "key")
        status, found, table, err = bench(*flags, *FOUND)
    numbers = found["measured"]["server"]
    assert (status, err, other.most, other.keys) == (0, "", 3, {"Bearer key"})
    assert (numbers["requests"], numbers["failed"], numbers["output_tokens"], numbers["prompt_tokens"]) == (
        6,
        0,
        18,
        24,
    )
    assert 50 <= numbers["ttft_ms"]["p50"] < 100 and 20 <= numbers["itl_ms"]["p50"] < 40
    assert 20 <= numbers["tpot_ms"]["p50"] < 40 and 110 <= numbers["e2e_ms"]["p50"] < 250
    assert numbers["output_tokens_per_second"] == pytest.approx(18 / numbers["seconds"])
    assert "front_ms_a_token" not in numbers, "it has no /metrics"
    assert all(body["max_tokens"] == 3 and body["ignore_eos"] and body["temperature"] == 0 for body in other.bodies)
    prompts = [body["prompt"] if endpoint == "completions" else body["messages"][0]["content"] for body in other.bodies]
    assert {len(prompt.split()) for prompt in prompts} == {4} and len(set(prompts)) == 6
    assert "output tokens per second" in table and "all at once" in table


def test_an_answer_that_is_not_whole_has_failed(bench):
    other = Other()
    with other_server(other) as url:
        other.cut_after = 2
        status, found, _, err = bench("--base-url", url, *FOUND)
        assert status == 2 and found is None
        assert "no request was answered: the stream ends before it is whole" in err
        other.cut_after = None
        status, _, _, err = bench("--base-url", url, "--model", "third", *FOUND)
        assert status == 2 and "no request was answered: status 404: no such model" in err


def test_this_server(bench, served):
    status, found, table, _ = bench("--base-url", served.url, "--num-prompts", "3", "--request-rate", "50")
    numbers = found["measured"]["server"]
    assert status == 0 and numbers["requests"] == 3 and found["machine"]["model"] == "storyteller"
    load = serve_load.asks(3, None, 1024 * 4 // 5, 0)
    assert numbers["output_tokens"] == sum(ask.num_tokens for ask in load)
    assert numbers["front_ms_a_token"] > 0 and "front ms a token" in table


def test_lengths_are_those_of_chats():
    load = serve_load.asks(4000, None, 100_000, 0)
    inputs, outputs = [ask.num_words for ask in load], [ask.num_tokens for ask in load]
    assert sum(inputs) / len(load) == pytest.approx(serve_load.MEAN_INPUT, rel=0.1)
    assert sum(outputs) / len(load) == pytest.approx(serve_load.MEAN_OUTPUT, rel=0.1)
    assert sorted(inputs)[2000] < 0.6 * serve_load.MEAN_INPUT, "most are short, a few are long"
    assert load == serve_load.asks(4000, None, 100_000, 0) != serve_load.asks(4000, None, 100_000, 1)
    assert all(ask.num_words + ask.num_tokens <= 500 for ask in serve_load.asks(1000, None, 500, 0))


def test_arrivals_are_a_poisson_process():
    times = list(serve_load.arrivals(4000, 10.0, 0))
    gaps = [later - earlier for earlier, later in pairwise(times)]
    mean = sum(gaps) / len(gaps)
    assert mean == pytest.approx(0.1, rel=0.1)
    assert math.dist(gaps, [mean] * len(gaps)) / math.sqrt(len(gaps)) == pytest.approx(mean, rel=0.1), "as wide as long"


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--base-url", "localhost:8000"], "base_url must be http://... or https://..., not 'localhost:8000'"),
        (["--base-url", "http://127.0.0.1:1"], "the server at 127.0.0.1:1 does not say which models it has"),
        (["--input-len", "3"], "give both input_len and output_len, or neither"),
    ],
)
def test_mistakes_are_told_in_a_line(bench, flags, says):
    status, found, out, err = bench(*flags)
    assert (status, found, out) == (2, None, "") and says in err and err.count("\n") == 1


def test_addresses():
    assert (
        Target.of("http://a:1").port == 1
        and Target.of("http://a/v1").path == ""
        and Target.of("http://a/b").path == "/b"
    )
    with pytest.raises(ValueError, match="is no address"):
        Target.of("http://a:b")
