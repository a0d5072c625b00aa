"""nanovllm bench serve, against a tiny server of another kind and against this one; and nanovllm bench http."""

import asyncio
import json
import math
import sys
import threading
from contextlib import contextmanager, nullcontext
from itertools import pairwise

import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.responses import JSONResponse, PlainTextResponse, StreamingResponse
from starlette.routing import Route

from ...__main__ import main
from ...bench import load, workload
from ...bench.bench_options import Http
from ...bench.engine import Run
from ...bench.load import own_server
from ...server.run import listening_socket
from ..testing.engines import UNMEASURED
from ..testing.served import STORYTELLER

SMALL = ("--num-prompts", "6", "--input-len", "4", "--output-len", "3")


class Other:
    """A server with responses like OpenAI's own: and none of our fields."""

    def __init__(self) -> None:
        self.bodies: list[dict] = []
        self.keys: set[str] = set()
        self.most = self.running = 0
        self.cut_after: int | None = None  # pieces
        self.num_awaited = 1  # requests that must run at once before the first one is answered

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
        while self.most < self.num_awaited:
            await asyncio.sleep(0.001)
        if is_chat:
            yield self.event(delta={"role": "assistant", "content": ""}, finish_reason=None)
        for i in range(body["max_tokens"]):
            if i == self.cut_after:
                self.running -= 1
                return
            text = {"delta": {"content": "a"}} if is_chat else {"text": "a"}
            yield self.event(**text, finish_reason=None)
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
        listener.listen()  # the thread below may start late
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
    """Return a function that runs a benchmark, and returns its exit status, its report or None, output and errors."""

    def command(*flags, name="serve"):
        file = tmp_path / "report.json"
        status = main(["bench", name, "--json", str(file), *flags])
        text = file.read_text()
        return status, json.loads(text) if text else None, *capsys.readouterr()

    return command


@pytest.mark.parametrize("endpoint", ["completions", "chat"])
def test_load_on_another_server(bench, endpoint):
    other = Other()
    other.num_awaited = 3
    with other_server(other) as url:
        flags = ("--base-url", url, "--endpoint", endpoint, "--max-concurrency", "3", "--api-key", "key")
        status, report, table, err = bench(*flags, *SMALL)
    numbers = report["measured"]["server"]
    assert (status, err, other.most, other.keys) == (0, "", 3, {"Bearer key"})
    assert (numbers["completed"], numbers["failed"]) == (6, 0)
    assert (numbers["total_input_tokens"], numbers["total_output_tokens"]) == (24, 18)
    assert all(0 < numbers[name]["p50"] <= numbers["e2el_ms"]["p50"] for name in ("ttft_ms", "itl_ms", "tpot_ms"))
    assert numbers["request_throughput"] == pytest.approx(6 / numbers["duration"])
    assert numbers["output_throughput"] == pytest.approx(18 / numbers["duration"])
    assert numbers["total_token_throughput"] == pytest.approx(42 / numbers["duration"])
    assert numbers["client_share_of_a_core"] > 0
    assert all(body["max_tokens"] == 3 and body["ignore_eos"] and body["temperature"] == 0 for body in other.bodies)
    prompts = [body["prompt"] if endpoint == "completions" else body["messages"][0]["content"] for body in other.bodies]
    assert {len(prompt.split()) for prompt in prompts} == {4} and len(set(prompts)) == 6
    assert "output throughput" in table and "all at once" in table


def test_dataset_has_the_prompts_and_the_lengths(bench, tmp_path):
    lines = [{"prompt": "the fox", "output_tokens": 2}, {"prompt": "the wood"}, {"prompt": "a", "output_tokens": 5}]
    (tmp_path / "requests.jsonl").write_text("\n".join(map(json.dumps, lines)))
    other = Other()
    with other_server(other) as url:
        flags = ("--base-url", url, "--dataset-path", str(tmp_path / "requests.jsonl"), "--output-len", "3")
        status, report, _, _ = bench(*flags)
    assert status == 0 and report["settings"]["num_prompts"] == 3
    sent = {body["prompt"]: body["max_tokens"] for body in other.bodies}
    assert sent == {"the fox": 2, "the wood": 3, "a": 5}, "--output-len is for requests without output_tokens"


def test_incomplete_response_counts_as_failed(bench):
    other = Other()
    with other_server(other) as url:
        other.cut_after = 2
        status, report, _, err = bench("--base-url", url, *SMALL)
        assert status == 2 and report is None
        assert "the stream ended before it was complete" in err
        other.cut_after = None
        status, _, _, err = bench("--base-url", url, "--model", "third", *SMALL)
        assert status == 2 and "no request was answered: status 404: no such model" in err


def test_missing_aiohttp_is_a_one_line_error(bench, monkeypatch):
    monkeypatch.setitem(sys.modules, "aiohttp", None)
    monkeypatch.delitem(sys.modules, "nanovllm.bench.load", raising=False)
    status, _, out, err = bench()
    assert (status, out) == (2, "") and "'.[bench]'" in err and err.count("\n") == 1


@pytest.mark.full
def test_load_on_this_server(bench, served):
    status, report, table, _ = bench("--base-url", served.url, "--num-prompts", "3", "--request-rate", "50")
    numbers = report["measured"]["server"]
    assert status == 0 and numbers["completed"] == 3 and report["machine"]["model"] == "storyteller"
    load = workload.chats(3, None, 1024 * 4 // 5, 0)
    assert numbers["total_output_tokens"] == sum(num_tokens for _, num_tokens in load)
    assert "client share of a core" in table


@pytest.mark.full
@pytest.mark.parametrize("is_own", [False, True])
def test_http_is_compared_with_the_engine_itself(bench, served, monkeypatch, is_own):
    if not is_own:
        monkeypatch.setattr(load, "own_server", lambda engine: nullcontext((served.url, "none")))
    monkeypatch.setattr(load, "NUM_SINGLES", 2)
    flags = ("--num-prompts", "2", "--input-len", "5", "--output-len", "4", "--rounds", "2", "--model", STORYTELLER)
    status, report, table, err = bench(*map(str, flags), *UNMEASURED, name="http")
    assert (status, err) == (0, "")
    offline, online = report["measured"]["offline"], report["measured"]["http"]
    share, later = report["throughput_share"], report["first_token_later_ms"]
    assert offline["tokens_per_second"] > 0 and online["tokens_per_second"] > 0
    assert 0 < share["least"] <= share["median"] <= share["largest"]
    assert later["least"] <= later["median"] <= later["largest"]
    assert all(each["first_token_alone_ms"]["p50"] > 0 for each in (offline, online))
    assert ("the kernels differ" in table) != is_own
    assert "HTTP reaches " in table and "first token alone ms" in table


def test_throughput_is_the_median_of_the_rounds():
    turns = [load.HttpTurn(Run([[0] * 100], [[0.1, seconds]]), [seconds]) for seconds in (2.0, 1.0, 4.0)]
    numbers = load.summarize_turns(turns)
    assert (numbers["tokens_per_second"], numbers["first_token_alone_ms"]["p50"]) == (50, 2000)


def test_prompts_are_unique():
    class Model:
        max_model_len, model_config = 100, type("Config", (), {"vocab_size": 50})

    loads = load.make_rounds(Model(), Http(rounds=2, num_prompts=4, input_len=10, output_len=6, spread=0.5))
    prompts = [tuple(task.prompt) for together, alone in loads for task in together + alone]
    assert len(set(prompts)) == len(prompts) == 3 * (4 + load.NUM_SINGLES)


@pytest.mark.full
def test_server_that_does_not_start_raises(tmp_path):
    with pytest.raises(ValueError, match="the server did not start: error: "), own_server({"model": str(tmp_path)}):
        pass


def test_lengths_are_like_those_of_chats():
    load = workload.chats(4000, None, 100_000, 0)
    inputs, outputs = [len(prompt.split()) for prompt, _ in load], [num_tokens for _, num_tokens in load]
    assert sum(inputs) / len(load) == pytest.approx(workload.MEAN_INPUT, rel=0.1)
    assert sum(outputs) / len(load) == pytest.approx(workload.MEAN_OUTPUT, rel=0.1)
    assert sorted(inputs)[2000] < 0.6 * workload.MEAN_INPUT, "most are short, a few are long"
    assert load == workload.chats(4000, None, 100_000, 0) != workload.chats(4000, None, 100_000, 1)
    cut = workload.chats(1000, None, 500, 0)
    assert all(len(prompt.split()) + num_tokens <= 500 for prompt, num_tokens in cut)


def test_arrivals_are_a_poisson_process():
    times = list(workload.arrivals(4000, 10.0, 0))
    gaps = [later - earlier for earlier, later in pairwise(times)]
    mean = sum(gaps) / len(gaps)
    assert mean == pytest.approx(0.1, rel=0.1)
    assert math.dist(gaps, [mean] * len(gaps)) / math.sqrt(len(gaps)) == pytest.approx(mean, rel=0.1), "as wide as long"


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["--base-url", "localhost:8000"], "got 'localhost:8000'"),
        (["--base-url", "http://a:b"], "got 'http://a:b'"),
        (["--base-url", "http://127.0.0.1:1"], "the server at 127.0.0.1:1 does not list its models"),
        (["--input-len", "3"], "set both input_len and output_len"),
    ],
)
def test_invalid_option_is_a_one_line_error(bench, flags, expected):
    status, report, out, err = bench(*flags)
    assert (status, report, out) == (2, None, "") and expected in err and err.count("\n") == 1
