"""Load tests for any OpenAI-compatible server, with requests like real users', and a benchmark of the cost of HTTP.

The client streams each response and records when each piece arrives. For the cost of HTTP, the engine in this process
and a server with the same engine take turns serving the same requests.
"""

import asyncio
import json
import math
import re
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

import aiohttp
from yarl import URL

from .. import __version__
from ..llm import LLM
from .bench_options import Http, ServerLoad
from .engine import Run, load_llm, serve, summarize_runs
from .harness import Spread, percentiles, ratio, take_turns
from .report import Report, machine, report_of
from .workload import Task, arrivals, chats, check_lengths, random_tasks, read_dataset

NOTE = "times in ms: p50 / p90 / p99 (ttft: first piece; itl: between pieces; tpot: mean of a request; e2el: its end)"
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
MAX_LINE_BYTES = 1 << 24
DEFAULT_MAX_MODEL_LEN = 2048  # for a server that does not report one
DEFAULT_OUTPUT_LEN = 256  # for requests of a dataset, as in vLLM
REQUEST_ERRORS = (OSError, aiohttp.ClientError, ValueError)
NUM_SINGLES = 8  # requests per round that are sent one at a time
SINGLE_LEN = 2  # tokens in each of their outputs
READY_LINE = re.compile(r"serving .* at (http://[^\s,]+), (.*)")  # from `nanovllm serve`
SECONDS_TO_END = 30.0  # until a server that hasn't ended is killed
TasksOfRound = tuple[list[Task], list[Task]]  # tasks served together, and tasks served one at a time


class BadResponse(Exception):
    """A response with an error, or one that ended too early."""


@dataclass
class Outcome:
    """The response to one request. Times are in seconds since the request was sent."""

    pieces: list[float] = field(default_factory=list)  # when each piece of text arrived
    seconds: float = 0.0
    num_prompt_tokens: int = 0
    num_tokens: int = 0
    error: str | None = None


class Streamed(NamedTuple):
    """The responses to many requests, and the seconds from the first request to the last response."""

    outcomes: list[Outcome]
    seconds: float
    cpu_seconds: float  # processor time of this process


class Client:
    """A client of one server. Each request opens its own connection, as with many users."""

    def __init__(self, session: aiohttp.ClientSession, base_url: URL) -> None:
        self._session, self._base_url = session, str(base_url).rstrip("/")
        self.server = f"{base_url.host}:{base_url.port}"

    async def stream(self, path: str, body: dict[str, Any]) -> Outcome:
        """Send a request, and read its stream. A stream without a finish_reason and a final [DONE] is an error."""
        outcome, start = Outcome(), time.perf_counter()
        usage = {"stream": True, "stream_options": {"include_usage": True}}
        try:
            async with self._session.post(f"{self._base_url}{path}", json=body | usage) as response:
                if response.status != 200:
                    raise BadResponse(f"status {response.status}: {(await response.text())[:200]}")
                is_finished = is_done = False
                async for line in response.content:
                    if not line.startswith(b"data:"):
                        continue
                    if is_done := line[5:].strip() == b"[DONE]":
                        break
                    is_finished |= note_event(outcome, json.loads(line[5:]), time.perf_counter() - start)
                if not (is_done and is_finished):
                    raise BadResponse("the stream ended before it was complete")
        except BadResponse as error:
            outcome.error = str(error)
        except REQUEST_ERRORS as error:
            outcome.error = f"{type(error).__name__}: {error}"
        outcome.seconds = time.perf_counter() - start
        return outcome

    async def stream_all(
        self,
        path: str,
        bodies: Sequence[dict[str, Any]],
        times: Sequence[float] | None = None,
        max_concurrency: int | None = None,
    ) -> Streamed:
        """Send each request at its scheduled time, or all immediately, at most `max_concurrency` at a time."""
        semaphore = asyncio.Semaphore(max_concurrency) if max_concurrency else nullcontext()
        cpu_start, start = time.process_time(), time.perf_counter()

        async def send(body: dict[str, Any], when: float) -> Outcome:
            await asyncio.sleep(start + when - time.perf_counter())
            async with semaphore:
                return await self.stream(path, body)

        pairs = zip(bodies, times or [0.0] * len(bodies), strict=True)
        outcomes = await asyncio.gather(*(send(body, when) for body, when in pairs))
        return Streamed(outcomes, time.perf_counter() - start, time.process_time() - cpu_start)

    async def first_model(self) -> tuple[str, int]:
        """Return the name and max_model_len of the server's first model. Raise ValueError if the server lists none."""
        try:
            async with self._session.get(f"{self._base_url}/v1/models") as response:
                body = await response.text()
            if response.status != 200:
                raise BadResponse(f"status {response.status}: {body[:200]}")
            [first, *_] = json.loads(body)["data"]
            return first["id"], first.get("max_model_len") or DEFAULT_MAX_MODEL_LEN
        except (*REQUEST_ERRORS, BadResponse, KeyError, TypeError) as error:
            raise ValueError(f"the server at {self.server} does not list its models: {error}") from None


@asynccontextmanager
async def connect(base_url: str, api_key: str | None = None) -> AsyncIterator[Client]:
    """Yield a client of the server at `base_url`, which may end in /v1. Raise ValueError for an invalid URL."""
    try:
        url = URL(base_url.rstrip("/").removesuffix("/v1"))
        is_valid = url.scheme in ("http", "https") and bool(url.host)
    except ValueError:
        is_valid = False
    if not is_valid:
        raise ValueError(f"base_url must be http://HOST... or https://HOST..., got {base_url!r}")
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    connector, timeout = aiohttp.TCPConnector(limit=0, force_close=True), aiohttp.ClientTimeout(total=None)
    session = aiohttp.ClientSession(connector=connector, headers=headers, timeout=timeout, read_bufsize=MAX_LINE_BYTES)
    async with session:
        yield Client(session, url)


def note_event(outcome: Outcome, event: dict[str, Any], now: float) -> bool:
    """Add an event to the outcome, and return whether the event has a finish_reason. Raise BadResponse for an error.

    A token may have no text, because its character is not complete yet or the server has no tokenizer.
    """
    if "error" in event:
        raise BadResponse(f"an error event: {str(event)[:200]}")
    if usage := event.get("usage"):
        outcome.num_prompt_tokens, outcome.num_tokens = usage["prompt_tokens"], usage["completion_tokens"]
    is_finished = False
    for choice in event.get("choices") or []:
        delta, is_last = choice.get("delta") or {}, choice.get("finish_reason") is not None
        if choice.get("text") or delta.get("content") or not (is_last or "role" in delta):
            outcome.pieces.append(now)
        is_finished |= is_last
    return is_finished


# ---- nanovllm bench serve


def serve_load(options: ServerLoad) -> Report:
    """Send the requests, and return the report. Raise ValueError for conflicting options, or if no request succeeds."""
    if not options.dataset_path and (options.input_len is None) != (options.output_len is None):
        raise ValueError("set both input_len and output_len, or neither for lengths typical of chats")
    if options.dataset_path and options.input_len is not None:
        raise ValueError(f"{options.dataset_path} has the prompts: input_len must not be set, got {options.input_len}")
    return asyncio.run(measure_load(options))


async def measure_load(options: ServerLoad) -> Report:
    """Send the requests, and return the report. Raise ValueError if no request succeeds."""
    lengths = (options.input_len, options.output_len) if options.input_len and options.output_len else None
    output_len, dataset = options.output_len or DEFAULT_OUTPUT_LEN, list[tuple[str, int]]()
    if options.dataset_path:
        dataset = read_dataset(options.dataset_path, output_len)
    count = len(dataset) or options.num_prompts
    path = CHAT if options.endpoint == "chat" else COMPLETIONS
    times = list(arrivals(count, options.request_rate, options.seed))
    async with connect(options.base_url, options.api_key) as client:
        name, longest = await client.first_model()
        longest = min(longest, DEFAULT_MAX_MODEL_LEN) * 4 // 5  # in words, some of which are two tokens
        model, extra = options.model or name, {"ignore_eos": True} if options.ignore_eos else {}
        bodies: list[dict[str, Any]] = []
        for prompt, num_tokens in dataset or chats(count, lengths, longest, options.seed):
            text = {"messages": [{"role": "user", "content": prompt}]} if path == CHAT else {"prompt": prompt}
            bodies.append({"model": model, **text, "max_tokens": num_tokens, "temperature": 0, **extra})
        streamed = await client.stream_all(path, bodies, times, options.max_concurrency)
    measured = summarize_outcomes(streamed.outcomes, streamed.seconds)
    measured["client_share_of_a_core"] = streamed.cpu_seconds / streamed.seconds
    errors = [each.error for each in streamed.outcomes if each.error]
    settings = {
        "num_prompts": count,
        "request_rate": "all at once" if options.request_rate == math.inf else options.request_rate,
        "max_concurrency": options.max_concurrency or "no limit",
        "endpoint": options.endpoint,
        "lengths": options.dataset_path or (f"{lengths[0]} + {lengths[1]}" if lengths else "typical of chats"),
    }
    versions = {"nanovllm": __version__, "server": client.server, "model": model}
    notes = [NOTE, *([f"{len(errors)} requests failed, the first: {errors[0]}"] if errors else [])]
    return report_of("serve", settings, versions, {"server": measured}, notes)


def summarize_outcomes(outcomes: Sequence[Outcome], seconds: float) -> dict[str, Any]:
    """Return the results of the requests without errors, named as in vLLM's benchmark.

    A piece may hold several tokens. Raise ValueError if every request failed.
    """
    complete = [each for each in outcomes if each.error is None]
    if not complete:
        raise ValueError(f"no request was answered: {outcomes[0].error}")
    tokens = sum(each.num_tokens or len(each.pieces) for each in complete)
    prompts = sum(each.num_prompt_tokens for each in complete)
    started = [each for each in complete if each.pieces]
    mean_gaps = [(each.pieces[-1] - each.pieces[0]) / (each.num_tokens - 1) for each in started if each.num_tokens > 1]
    return {
        "completed": len(complete),
        "failed": len(outcomes) - len(complete),
        "duration": seconds,
        "total_input_tokens": prompts,
        "total_output_tokens": tokens,
        "request_throughput": len(complete) / seconds,
        "output_throughput": tokens / seconds,
        "total_token_throughput": (prompts + tokens) / seconds,
        "ttft_ms": percentiles([each.pieces[0] for each in started]),
        "itl_ms": percentiles([after - before for each in started for before, after in pairwise(each.pieces)]),
        "tpot_ms": percentiles(mean_gaps),
        "e2el_ms": percentiles([each.seconds for each in complete]),
    }


# ---- nanovllm bench http


class HttpTurn(NamedTuple):
    """One round, with or without HTTP. Times are in seconds."""

    run: Run  # of the requests that are served together
    single_times: list[float]  # times to first token of the requests that are sent one at a time


def http(engine: dict[str, Any], options: Http) -> Report:
    """Compare throughput and the time to first token with and without HTTP."""
    llm = load_llm(engine)
    task_rounds = make_rounds(llm, options)
    with own_server(engine) as (url, kernels):
        offline_tasks, http_tasks = iter(task_rounds), iter(task_rounds)
        calls = {"offline": lambda: offline(llm, next(offline_tasks))}
        calls["http"] = lambda: asyncio.run(through_http(url, next(http_tasks)))
        results = take_turns(calls, options.rounds, title="http")
    share = ratio(results, "http", "offline", lambda turn: turn.run.tokens_per_second)
    medians = [{name: 1000 * statistics.median(turn.single_times) for name, turn in each.items()} for each in results]
    delay = Spread.of([each["http"] - each["offline"] for each in medians])
    notes = [
        "times in ms: p50 / p90 / p99 of all rounds; alone: one request at a time",
        "HTTP reaches " + share.text("of the engine's throughput"),
        "HTTP adds " + delay.text("ms to the time to first token, one request at a time"),
    ]
    if kernels != llm.llm_engine.kernels.description:
        notes.append(f"the kernels differ: the server has {kernels}")
    measured = {name: summarize_turns([each[name] for each in results]) for name in calls}
    extra = {"throughput_share": share._asdict(), "first_token_later_ms": delay._asdict()}
    return report_of("http", options, machine(llm), measured, notes, **extra)


def make_rounds(llm: LLM, options: Http) -> list[TasksOfRound]:
    """Return the tasks of each round. No prompt is used twice, because clients can't clear a server's cache."""
    count, vocab_size = 1 + options.rounds, llm.model_config.vocab_size  # the first round is a warm-up
    size, num_single, input_len = options.num_prompts, NUM_SINGLES, options.input_len
    together = random_tasks(vocab_size, count * size, input_len, options.output_len, options.spread)
    # Another length gives other tokens.
    single = random_tasks(vocab_size, count * num_single, input_len + 1, SINGLE_LEN)
    check_lengths([*together, *single], llm.max_model_len)
    return [(together[i * size :][:size], single[i * num_single :][:num_single]) for i in range(count)]


def offline(llm: LLM, tasks: TasksOfRound) -> HttpTurn:
    """Serve a round's tasks with the engine."""
    together, single = tasks
    return HttpTurn(serve(llm, together), [serve(llm, [task]).first_tokens[0] for task in single])


async def through_http(url: str, tasks: TasksOfRound) -> HttpTurn:
    """Serve a round's tasks through the server."""
    together, single = tasks
    async with connect(url) as client:
        run = await serve_through_client(client, together)
        return HttpTurn(run, [(await serve_through_client(client, [task])).first_tokens[0] for task in single])


async def serve_through_client(client: Client, tasks: Sequence[Task]) -> Run:
    """Serve tasks through the server and time each piece. Raise ValueError if a response is incomplete."""
    model, _ = await client.first_model()
    common = {"model": model, "temperature": 0, "ignore_eos": True}
    bodies = [{"prompt": task.prompt, "max_tokens": task.num_output_tokens, **common} for task in tasks]
    outcomes = (await client.stream_all(COMPLETIONS, bodies)).outcomes
    for outcome, task in zip(outcomes, tasks, strict=True):
        if outcome.error or outcome.num_tokens != task.num_output_tokens:
            got = f"expected {task.num_output_tokens} tokens, got {outcome.num_tokens}"
            raise ValueError(f"a request failed: {outcome.error or got}")
    return Run([[0] * each.num_tokens for each in outcomes], [each.pieces for each in outcomes])


def summarize_turns(turns: Sequence[HttpTurn]) -> dict[str, Any]:
    """Return medians of the rounds, and percentiles of the times in all rounds."""
    speed = statistics.median(turn.run.tokens_per_second for turn in turns)  # each round has different tasks
    single = percentiles([each for turn in turns for each in turn.single_times])
    return summarize_runs([turn.run for turn in turns]) | {"tokens_per_second": speed, "first_token_alone_ms": single}


@contextmanager
def own_server(engine: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Run `nanovllm serve` with these options on a free port. Yield the server's address and its kernels.

    Raise ValueError, with the server's output, if the server doesn't start.
    """
    command = [sys.executable, "-m", "nanovllm", "serve", "--port", "0", *flags_of(engine)]
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert server.stderr is not None
    lines: list[str] = []
    try:
        for line in server.stderr:
            if match := READY_LINE.search(line):
                yield match[1], match[2]
                return
            lines.append(line.strip())
        raise ValueError(f"the server did not start: {' '.join(lines)}")
    finally:
        server.terminate()
        try:
            server.communicate(timeout=SECONDS_TO_END)
        except subprocess.TimeoutExpired:
            server.kill()


def flags_of(engine: Mapping[str, Any]) -> list[str]:
    """Return the engine's options as flags of a command. Options that are None are left out.

    >>> flags_of({"block_size": 4, "enforce_eager": True, "enable_prefix_caching": False, "seed": None})
    ['--block-size=4', '--enforce-eager', '--no-enable-prefix-caching']
    """
    flags = []
    for flag, value in ((name.replace("_", "-"), value) for name, value in engine.items() if value is not None):
        switch = {True: f"--{flag}", False: f"--no-{flag}"}
        flags.append(switch[value] if isinstance(value, bool) else f"--{flag}={value}")
    return flags
