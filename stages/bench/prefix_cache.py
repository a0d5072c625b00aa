"""Prefix cache: what stage 6's is worth where requests begin alike. (What it costs where they do not, the scoreboard
says: stage 6 over stage 5.)

The model has 135M parameters and random weights. Engines with the cache on and off take turns, each on a clock of its
own. Prompts have 512 common tokens and 32 of their own; the first is served, then 31 come at once, a token each. Three
rounds, about a minute on two cores.
"""

import statistics
import time
from argparse import Namespace
from functools import partial
from pathlib import Path
from typing import Any

from stages.bench.engines import stage
from stages.bench.harness import Scores, take_turns, with_spreads
from stages.bench.models import SHAPE_135M, model_135m
from stages.bench.racing import sampling_params
from stages.bench.results import machine
from stages.bench.workloads import Request, shared_prompts

PREFIX, TAIL, FOLLOWERS = 512, 32, 31
STEPS_A_TURN, NUM_ROUNDS = 4, 3


def measure(args: Namespace) -> dict[str, Any]:
    prompts = shared_prompts(SHAPE_135M.vocab_size, PREFIX, TAIL, 1 + FOLLOWERS)
    rounds = [measure_shared(model_135m(), prompts, args.dtype) for _ in range(NUM_ROUNDS)]
    return {"prefix_cache": {"machine": machine(args.dtype), "shared": with_spreads(rounds)}}


class Clocked:
    """An engine whose clock runs only while it steps; when each request came, and when its first token did."""

    def __init__(self, folder: Path, is_caching: bool, num_tokens: int, dtype: str) -> None:
        options: dict[str, Any] = {"dtype": dtype, "kv_cache_tokens": num_tokens}
        self.llm = stage("s6").LLM(folder, enable_prefix_caching=is_caching, **options)
        self.engine = self.llm.llm_engine
        self.seconds, self.waits = 0.0, dict[str, float]()
        self._arrived: dict[str, float] = {}

    def add(self, request_id: str, prompt: list[int]) -> None:
        """A request for one token."""
        self._arrived[request_id] = self.seconds
        self.engine.add_request(request_id, prompt, sampling_params("s6", Request(prompt, 1)))

    def run(self, most: int) -> None:
        """So many steps, or fewer if nobody is left."""
        for _ in range(most):
            if not self.engine.has_unfinished_requests():
                break
            started = time.perf_counter()
            outputs = self.engine.step()
            self.seconds += time.perf_counter() - started
            for output in outputs:
                self.waits.setdefault(output.request_id, self.seconds - self._arrived[output.request_id])

    def arrive(self, prompts: list[list[int]]) -> None:
        """The first is served; then the others are there, all at once."""
        self.add("first", prompts[0])
        while self.engine.has_unfinished_requests():
            self.run(1)
        self.waits.clear()
        for number, prompt in enumerate(prompts[1:]):
            self.add(str(number), prompt)


def measure_shared(folder: Path, prompts: list[list[int]], dtype: str) -> Scores:
    """TTFT in seconds with the cache on and off, and how many times shorter it is with it."""
    room = sum(map(len, prompts)) + 32 * len(prompts)
    engines = {name: Clocked(folder, is_caching, room, dtype) for name, is_caching in (("on", True), ("off", False))}
    before = {}
    for name, clocked in engines.items():
        clocked.arrive([prompt[::-1] for prompt in prompts[:2]])  # warms up, with texts that do not come again
        clocked.run(10)
        clocked.arrive(prompts)
        before[name] = clocked.llm.model_runner.num_tokens
    num_steps = -(-sum(map(len, prompts[1:])) // engines["off"].llm.config.max_num_batched_tokens)
    num_turns = -(-(num_steps + 1) // STEPS_A_TURN)
    calls = {name: partial(clocked.run, STEPS_A_TURN) for name, clocked in engines.items()}
    take_turns(calls, num_turns, warm_ups=0, title="a shared prefix")
    found: dict[str, Any] = {}
    for name, clocked in engines.items():
        assert not clocked.engine.has_unfinished_requests(), "steps are missing"
        waits = clocked.waits.values()
        found |= {f"median_{name}_seconds": statistics.median(waits), f"last_{name}_seconds": max(waits)}
        found[f"tokens_{name}"] = clocked.llm.model_runner.num_tokens - before[name]
    return found | {"times_shorter": found["median_off_seconds"] / found["median_on_seconds"]}
