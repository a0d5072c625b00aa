"""Serves requests, and notes when each token came."""

import itertools
import time
from dataclasses import dataclass, field

from ...engine.executor import Scheduled
from ...engine.sequence import Sequence
from ...llm import LLM
from .workload import Task

IDS = map(str, itertools.count())


@dataclass
class Run:
    """One round of one engine. Times are in seconds."""

    seconds: float = 0.0
    num_tokens: int = 0
    num_steps: int = 0
    num_cached_tokens: int = 0
    num_blocks_loaded: int = 0  # from the host
    first_tokens: list[float] = field(default_factory=list)  # since the start, of each request
    gaps: list[float] = field(default_factory=list)  # between two tokens of a request


class StepCounter:
    """An observer that counts the steps in which a model ran."""

    num_steps = 0

    def on_step(self, batch: list[Scheduled], updated: list[Sequence]) -> None:
        """Count a step."""
        self.num_steps += bool(batch)


def serve(llm: LLM, tasks: list[Task]) -> Run:
    """Serve all at once. Raises ValueError if one of them cannot be served."""
    engine, run, last, counts = llm.llm_engine, Run(), dict[str, float](), dict[str, int]()
    steps, loaded = StepCounter(), engine.host_tier.num_blocks_loaded
    engine.observers.append(steps)
    start = time.perf_counter()
    for task in tasks:
        engine.add_request(next(IDS), task.prompt, task.params())
    while engine.has_unfinished_requests():
        outputs = engine.step()
        now = time.perf_counter()
        for output in outputs:
            if output.error:
                raise ValueError(f"a request could not be served: {output.error}")
            id, count = output.request_id, len(output.outputs[0].token_ids)
            if id not in last:
                run.first_tokens.append(now - start)
                run.num_cached_tokens += output.num_cached_tokens
            else:
                run.gaps += [(now - last[id]) / (count - counts[id])] * (count - counts[id])
            last[id], counts[id] = now, count
    run.seconds, run.num_tokens = time.perf_counter() - start, sum(counts.values())
    engine.observers.remove(steps)
    run.num_steps = steps.num_steps
    run.num_blocks_loaded = engine.host_tier.num_blocks_loaded - loaded
    assert run.num_tokens == sum(task.num_tokens for task in tasks), "a request got more or fewer tokens"
    return run


def percentiles(seconds: list[float]) -> dict[str, float]:
    """In milliseconds.

    >>> percentiles([0.001, 0.002, 0.003])
    {'p50': 2.0, 'p90': 3.0, 'p99': 3.0}
    """
    ordered = sorted(seconds)
    places = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
    last = len(ordered) - 1
    return {name: round(1000 * ordered[round(share * last)], 3) for name, share in places.items() if ordered}
