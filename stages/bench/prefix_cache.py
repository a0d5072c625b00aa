"""The prefix cache table: its gain in stage 6 for requests that begin the same way. The scoreboard has its cost.

Prompts for the model of 135M parameters have 512 common tokens and 32 of their own. The first is served; then 31 more
arrive together and generate one token each. Engines with the cache on and off take turns, each on its own clock.
"""

import statistics
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nanovllm.bench.harness import Scores, with_spreads
from nanovllm.bench.workload import Task
from stages.bench.engines import stage
from stages.bench.models import SHAPE_135M, model_135m
from stages.bench.racing import Racer, race, sampling_params
from stages.bench.results import machine
from stages.bench.workloads import shared_prompts

PREFIX, TAIL, FOLLOWERS, NUM_ROUNDS = 512, 32, 31, 3


def measure(args: Namespace) -> dict[str, Any]:
    """Measure three rounds, in about a minute on two cores."""
    prompts = shared_prompts(SHAPE_135M.vocab_size, PREFIX, TAIL, 1 + FOLLOWERS)
    rounds = [measure_shared(model_135m(), prompts, args.dtype) for _ in range(NUM_ROUNDS)]
    return {"prefix_cache": {"machine": machine(args.dtype), "shared": with_spreads(rounds)}}


def measure_shared(folder: Path, prompts: Sequence[list[int]], dtype: str) -> Scores:
    """Return the seconds to first token with the cache on and off, and their ratio."""
    room = sum(map(len, prompts)) + 32 * len(prompts)
    tasks, racers = [Task(prompt, 1) for prompt in prompts], {}
    for name in ("on", "off"):
        llm = stage("s6").LLM(folder, dtype=dtype, kv_cache_tokens=room, enable_prefix_caching=name == "on")
        warm_up = [prompt[::-1] for prompt in prompts[:2]]  # prompts that aren't used again
        for prompt in (*warm_up, prompts[0]):
            llm.generate([prompt], sampling_params("s6", tasks[0]))
        racers[name] = Racer("s6", llm, tasks[1:])
    race(racers, title="a shared prefix")
    result: dict[str, Any] = {}
    for name, racer in racers.items():
        waits = racer.first_tokens.values()
        result |= {f"median_{name}_seconds": statistics.median(waits), f"last_{name}_seconds": max(waits)}
        result[f"tokens_{name}"] = racer.num_computed_tokens
    return result | {"times_shorter": result["median_off_seconds"] / result["median_on_seconds"]}
