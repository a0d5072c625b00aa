"""The cost of HTTP: the engine and a server with the same engine take turns serving the same requests."""

import asyncio
import re
import statistics
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from ..llm import LLM
from .bench_options import Http
from .engine import Run, load_llm, numbers, serve
from .harness import Spread, percentiles, ratio, take_turns
from .load import COMPLETIONS, Client, connect
from .report import Report, machine, report_of
from .workload import Task, check_lengths, random_tasks

ALONE = 8  # requests per round that are sent one at a time
ALONE_TOKENS = 2  # in each of their outputs
ADDRESS = re.compile(r"serving .* at (http://[^\s,]+), (.*)")
SECONDS_TO_END = 30.0
TasksOfRound = tuple[list[Task], list[Task]]  # served together, and one at a time


@dataclass
class HttpTurn:
    """One round of one side. Times are in seconds."""

    run: Run  # of the requests that are served together
    alone: list[float]  # times to first token of requests that are sent one at a time
    front: float | None = None  # processor time of the server's HTTP process
    client: float = 0.0  # processor time of this process


def http(engine: dict[str, Any], options: Http) -> Report:
    """Compare throughput and the time to first token with and without HTTP."""
    llm = load_llm(engine)
    loads = make_loads(llm, options)
    with own_server(engine) as (url, kernels):
        own, other = iter(loads), iter(loads)
        calls = {
            "offline": lambda: offline(llm, next(own)),
            "http": lambda: asyncio.run(through_http(url, next(other))),
        }
        results = take_turns(calls, options.rounds, title="http")
    speeds = [{name: turn.run.tokens_per_second for name, turn in each.items()} for each in results]
    medians = [{name: statistics.median(turn.alone) for name, turn in each.items()} for each in results]
    share, later = ratio(speeds, "http", "offline"), [1000 * (each["http"] - each["offline"]) for each in medians]
    says = [
        "times in ms: p50 / p90 / p99 of all rounds; alone: one request at a time",
        "HTTP reaches " + share.text("of the engine's throughput"),
        "HTTP adds " + Spread.of(later).text("ms to the first token, alone"),
    ]
    if kernels != llm.llm_engine.kernels.description:
        says.append(f"the kernels differ: the server has {kernels}")
    measured = {name: numbers_of([each[name] for each in results]) for name in calls}
    more = {"throughput_share": share._asdict(), "first_token_later_ms": Spread.of(later)._asdict()}
    return report_of("http", options, machine(llm), measured, says, **more)


def make_loads(llm: LLM, options: Http) -> list[TasksOfRound]:
    """Return the tasks of each round. No prompt is used twice, because clients can't clear a server's cache."""
    count, vocab_size = 1 + options.rounds, llm.model_config.vocab_size
    size, input_len = options.num_prompts, options.input_len
    together = random_tasks(vocab_size, count * size, input_len, options.output_len, options.spread)
    alone = random_tasks(vocab_size, count * ALONE, input_len + 1, ALONE_TOKENS)  # other lengths have other tokens
    check_lengths([*together, *alone], llm.max_model_len)
    return [(together[i * size : (i + 1) * size], alone[i * ALONE : (i + 1) * ALONE]) for i in range(count)]


def offline(llm: LLM, load: TasksOfRound) -> HttpTurn:
    """Serve a round's tasks with the engine."""
    together, alone = load
    return HttpTurn(serve(llm, together), [serve(llm, [task]).first_tokens[0] for task in alone])


async def through_http(url: str, load: TasksOfRound) -> HttpTurn:
    """Serve a round's tasks through the server."""
    together, alone = load
    async with connect(url) as client:
        turn = await serve_by(client, together)
        turn.alone = [(await serve_by(client, [task])).run.first_tokens[0] for task in alone]
    return turn


async def serve_by(client: Client, tasks: Sequence[Task]) -> HttpTurn:
    """Serve tasks through the server and time each piece. Raise ValueError if a response is incomplete."""
    model, _ = await client.first_model()
    common = {"model": model, "temperature": 0, "ignore_eos": True}
    bodies = [{"prompt": task.prompt, "max_tokens": task.num_output_tokens, **common} for task in tasks]
    outcomes, _, used, front = await client.stream_all(COMPLETIONS, bodies)
    for outcome, task in zip(outcomes, tasks, strict=True):
        if outcome.error or outcome.num_tokens != task.num_output_tokens:
            got = f"expected {task.num_output_tokens} tokens, got {outcome.num_tokens}"
            raise ValueError(f"a request failed: {outcome.error or got}")
    run = Run([[0] * each.num_tokens for each in outcomes], [each.pieces for each in outcomes])
    return HttpTurn(run, [], front, used)


def numbers_of(turns: Sequence[HttpTurn]) -> dict[str, Any]:
    """Return medians of the rounds, and percentiles of the times of all rounds together."""
    results = numbers([turn.run for turn in turns])
    results["tokens_per_second"] = statistics.median(turn.run.tokens_per_second for turn in turns)
    results["first_token_alone_ms"] = percentiles([each for turn in turns for each in turn.alone])
    fronts = [1000 * turn.front / turn.run.num_tokens for turn in turns if turn.front is not None]
    if fronts:
        results["front_ms_per_token"] = statistics.median(fronts)
        results["client_ms_per_token"] = statistics.median(1000 * turn.client / turn.run.num_tokens for turn in turns)
    return results


@contextmanager
def own_server(engine: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Run `nanovllm serve` with these options on a free port. Yield its address and its kernels.

    Raise ValueError with its output if it doesn't start.
    """
    command = [sys.executable, "-m", "nanovllm", "serve", "--port", "0", *flags_of(engine)]
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert server.stderr is not None
    lines: list[str] = []
    try:
        for line in server.stderr:
            if match := ADDRESS.search(line):
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
    """Return the engine's options as flags.

    >>> flags_of({"block_size": 4, "enforce_eager": True, "enable_prefix_caching": False, "seed": None})
    ['--block-size=4', '--enforce-eager', '--no-enable-prefix-caching']
    """
    flags = []
    for name, value in engine.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            flags.append(f"--{flag}" if value else f"--no-{flag}")
        elif value is not None:
            flags.append(f"--{flag}={value}")
    return flags
