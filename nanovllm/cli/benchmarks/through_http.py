"""What HTTP costs: the engine itself and a server of its own serve the same requests in turns."""

import asyncio
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ...llm import LLM
from ..compiling import compiled_llm
from .http_stream import Target
from .own_server import own_server
from .report import machine
from .serve_load import Ask
from .serve_requests import COMPLETIONS, Form, Outcome, front_seconds, model_of, serve_all
from .throughput import serve_anew
from .timing import Run, percentiles
from .turns import ratio, take_turns
from .workload import Task, random_tasks

ALONE = 8  # requests of a round that come one at a time
ALONE_TOKENS = 2  # of their outputs


@dataclass
class Turn:
    """One round of one side. Times are in seconds."""

    run: Run  # all requests together
    alone: list[float]  # to the first token, of requests that come one at a time
    front: float | None = None  # processor time of the server's front, which the system counts in hundredths
    client: float = 0.0

    @property
    def tokens_per_second(self) -> float:
        return self.run.num_tokens / self.run.seconds

    @property
    def first_token(self) -> float:
        return statistics.median(self.alone)


Load = tuple[list[Task], list[Task]]  # together, and one at a time


def measure(
    engine: dict[str, Any], rounds: int, num_prompts: int, input_len: int, output_len: int, spread: float
) -> dict[str, Any]:
    llm = compiled_llm(engine)
    loads = make_loads(llm, 1 + rounds, num_prompts, input_len, output_len, spread)
    with own_server(engine) as (target, kernels):
        served = Served(target)
        calls = {"offline": each_time(loads, lambda load: offline(llm, load)), "http": each_time(loads, served.turn)}
        found = take_turns(calls, rounds, "http")
    settings = {"num_prompts": num_prompts, "input_len": input_len, "output_len": output_len, "spread": spread}
    share = ratio(found, "http", "offline", lambda turn: turn.tokens_per_second)
    later = differences([each["http"].first_token - each["offline"].first_token for each in found])
    own = llm.llm_engine.kernels.says
    return {
        "bench": "http",
        "settings": settings | {"rounds": rounds},
        "machine": machine(llm),
        "measured": {name: numbers([each[name] for each in found]) for name in calls},
        "throughput_share": share,
        "first_token_later_ms": later,
        "says": [
            "times in ms: p50 / p90 / p99 of all rounds; alone: one request at a time",
            "through HTTP {median:.3f} of the engine's own throughput ({least:.3f} to {largest:.3f})".format(**share),
            "first token alone {median:.2f} ms later ({least:.2f} to {largest:.2f})".format(**later),
            *([f"not the same kernels: the server has {kernels}"] if kernels != own else []),
        ],
    }


def make_loads(llm: LLM, count: int, num_prompts: int, input_len: int, output_len: int, spread: float) -> list[Load]:
    """One a round, and no prompt twice: a server's cache cannot be emptied from outside."""
    together = random_tasks(llm, count * num_prompts, input_len, output_len, spread)
    alone = random_tasks(llm, count * ALONE, input_len + 1, ALONE_TOKENS)  # another length: other tokens
    return [
        (together[i * num_prompts : (i + 1) * num_prompts], alone[i * ALONE : (i + 1) * ALONE]) for i in range(count)
    ]


def each_time(loads: Sequence[Load], turn: Callable[[Load], Turn]) -> Callable[[], Turn]:
    """A call takes the next load."""
    rest = iter(loads)
    return lambda: turn(next(rest))


def offline(llm: LLM, load: Load) -> Turn:
    together, alone = load
    run = serve_anew(llm, together)
    return Turn(run, [serve_anew(llm, [task]).first_tokens[0] for task in alone])


class Served:
    """The server's turns."""

    def __init__(self, target: Target) -> None:
        self._target = target
        name, _ = asyncio.run(model_of(target))
        self._form = Form(COMPLETIONS, name, {"ignore_eos": True})

    def turn(self, load: Load) -> Turn:
        return asyncio.run(self._turn(*load))

    async def _turn(self, together: list[Task], alone: list[Task]) -> Turn:
        front, client = await front_seconds(self._target), time.process_time()
        outcomes, seconds = await self._serve(together, len(together))
        client, later = time.process_time() - client, await front_seconds(self._target)
        assert front is not None and later is not None, "its /metrics tells the front's processor time"
        run = Run(seconds, sum(task.num_tokens for task in together))
        run.first_tokens = [each.pieces[0] for each in outcomes]
        run.gaps = [gap for each in outcomes for gap in each.gaps]
        singles, _ = await self._serve(alone, 1)
        return Turn(run, [each.pieces[0] for each in singles], later - front, client)

    async def _serve(self, tasks: list[Task], most: int) -> tuple[list[Outcome], float]:
        """Raises ValueError for an answer that is not what was asked for."""
        asks = [Ask(task.prompt, len(task.prompt), task.num_tokens) for task in tasks]
        outcomes, seconds = await serve_all(self._target, self._form, asks, [0.0] * len(asks), most)
        for outcome, task in zip(outcomes, tasks, strict=True):
            if outcome.error or outcome.num_tokens != task.num_tokens:
                raise ValueError(f"a request failed: {outcome.error or f'{outcome.num_tokens} tokens came'}")
        return outcomes, seconds


def numbers(turns: list[Turn]) -> dict[str, Any]:
    """Medians of the rounds; of times, those of all rounds together."""
    found = {
        "tokens_per_second": statistics.median(turn.tokens_per_second for turn in turns),
        "first_token_ms": percentiles([each for turn in turns for each in turn.run.first_tokens]),
        "between_tokens_ms": percentiles([each for turn in turns for each in turn.run.gaps]),
        "first_token_alone_ms": percentiles([each for turn in turns for each in turn.alone]),
    }
    fronts = [1000 * turn.front / turn.run.num_tokens for turn in turns if turn.front is not None]
    if fronts:
        found["front_ms_a_token"] = statistics.median(fronts)
        found["client_ms_a_token"] = statistics.median(1000 * turn.client / turn.run.num_tokens for turn in turns)
    return found


def differences(seconds: list[float]) -> dict[str, float]:
    """In milliseconds.

    >>> differences([0.001, 0.002, 0.006])
    {'median': 2.0, 'least': 1.0, 'largest': 6.0}
    """
    found = {"median": statistics.median(seconds), "least": min(seconds), "largest": max(seconds)}
    return {name: round(1000 * number, 3) for name, number in found.items()}
