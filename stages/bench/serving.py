"""Two tables of the model of 135M parameters: serving, and the prefix cache.

`serving`: 32 requests of 16 to 256 tokens arrive together, at a pool of 2,048, in stages 3 and 4. `peers`: transformers
serves them in the same run, by `generate` on one left-padded batch of all 32, and by the continuous batching behind
`generate_batch`. Their memory is not limited to the pool, so stage 4 is measured once more with room for all. Only
tokens that a request needs count.

`prefix_cache`: the gain of stage 6 for requests that begin the same way; the scoreboard has its cost. Prompts have 512
common tokens and 32 of their own. The first is served; then 31 more arrive together and generate one token each.
Engines with the cache on and off take turns, each on its own clock.
"""

import itertools
import statistics
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from nanovllm.bench.harness import Scores, median_scores, ratio, speed, with_spreads
from nanovllm.bench.workload import Task, mixed_tasks
from stages.bench.engines import stage
from stages.bench.models import SHAPE_135M, bytes_per_token, model_135m
from stages.bench.peers import TRANSFORMERS, PeerProcess
from stages.bench.racing import Racer, race, sampling_params
from stages.bench.results import machine
from stages.bench.workers.worker import Settings
from stages.bench.workloads import shared_prompts

SMALL_POOL, ROOMY_POOL = 2048, 16384  # the second has room for all requests, and for tokens cached before
STAGES, NUM_ROUNDS = ("s3", "s4"), 2
PREFIX, TAIL, FOLLOWERS, NUM_PREFIX_ROUNDS = 512, 32, 31, 3


def measure(args: Namespace) -> dict[str, Any]:
    """Measure the stages and the peers."""
    tasks, options = mixed_tasks(SHAPE_135M.vocab_size), {"dtype": args.dtype, "kv_cache_tokens": SMALL_POOL}
    serve_once(STAGES, model_135m(), mixed_tasks(SHAPE_135M.vocab_size, 2, high=32), options)  # warms up
    rounds = [serve_once(STAGES, model_135m(), tasks, options) for _ in tqdm(range(NUM_ROUNDS), "serving", leave=False)]
    peers = measure_peers(STAGES[-1], model_135m(), tasks, args.dtype)
    num_tokens = sum(task.num_output_tokens for task in tasks)
    result = {"machine": machine(args.dtype), "output_tokens": num_tokens, **compare(rounds), "peers": peers}
    return {"serving": result}


def serve_once(
    names: Sequence[str], folder: Path, tasks: Sequence[Task], options: Mapping[str, Any]
) -> dict[str, Scores]:
    """Return the scores of one race."""
    racers = {name: Racer(name, stage(name).LLM(folder, **options), tasks) for name in names}
    race(racers)
    return {name: racer.scores() for name, racer in racers.items()}


def compare(rounds: Sequence[Mapping[str, Scores]]) -> dict[str, Any]:
    """Return each stage's medians, and its speedup over the previous stage, round by round."""
    result: dict[str, Any] = median_scores(rounds)
    for before, after in itertools.pairwise(rounds[0]):
        result[f"{after}_over_{before}"] = {"rounds": len(rounds), **ratio(rounds, after, before, speed).named("ratio")}
    return result


def measure_peers(name: str, folder: Path, tasks: Sequence[Task], dtype: str) -> dict[str, Any]:
    """Return the scores of transformers' two ways, and of the stage `name` with room for all; or an error."""
    options = {"dtype": dtype, "kv_cache_tokens": ROOMY_POOL}
    runs: dict[str, Callable[[], list[Scores]]] = {
        "generate": partial(serve_by_peer, "transformers", folder, tasks, dtype),
        name: lambda: [serve_once([name], folder, tasks, options)[name] for _ in range(NUM_ROUNDS)],
        "generate_batch": partial(serve_by_peer, "transformers-batch", folder, tasks, dtype),
    }
    result: dict[str, Any] = {}
    for key, run in tqdm(runs.items(), desc="peers", leave=False):
        try:
            result[key] = with_spreads(run())
        except Exception as error:  # any error of a peer belongs to the result
            result[key] = {"error": f"{type(error).__name__}: {error}"}
    return result


def serve_by_peer(name: str, folder: Path, tasks: Sequence[Task], dtype: str) -> list[Scores]:
    """Return transformers' scores of each round."""
    longest, token_bytes = max(task.num_tokens for task in tasks), bytes_per_token(SHAPE_135M, getattr(torch, dtype))
    num_bytes = len(tasks) * longest * token_bytes
    settings = Settings(str(folder), dtype, torch.get_num_threads(), longest, len(tasks), num_bytes)
    with closing(PeerProcess(TRANSFORMERS._replace(name=name), settings)) as process:
        process.serve([task.shortened(2) for task in tasks[:2]])  # warms up
        runs = [process.serve(tasks) for _ in range(NUM_ROUNDS)]
    steps = {"steps": max(task.num_output_tokens for task in tasks)} if name == "transformers" else {}
    return [{"tokens_per_second": run.tokens_per_second, "seconds": run.seconds, **steps} for run in runs]


# ---- the prefix cache


def measure_prefix_cache(args: Namespace) -> dict[str, Any]:
    """Measure NUM_PREFIX_ROUNDS rounds."""
    prompts = shared_prompts(SHAPE_135M.vocab_size, PREFIX, TAIL, 1 + FOLLOWERS)
    rounds = [measure_shared(model_135m(), prompts, args.dtype) for _ in range(NUM_PREFIX_ROUNDS)]
    return {"prefix_cache": {"machine": machine(args.dtype), "shared": with_spreads(rounds)}}


def measure_shared(folder: Path, prompts: Sequence[list[int]], dtype: str) -> Scores:
    """Return the seconds to first token with the cache on and off, and their ratio."""
    room = sum(map(len, prompts)) + 32 * len(prompts)
    tasks, racers = [Task(prompt, 1) for prompt in prompts], {}
    for name in ("on", "off"):
        llm = stage("s6").LLM(folder, dtype=dtype, kv_cache_tokens=room, enable_prefix_caching=name == "on")
        for prompt in (prompts[0][::-1], prompts[1][::-1], prompts[0]):  # two warm up, and aren't used again
            llm.generate([prompt], sampling_params("s6", tasks[0]))
        racers[name] = Racer("s6", llm, tasks[1:])
    race(racers, title="a shared prefix")
    result: Scores = {}
    for name, racer in racers.items():
        waits = racer.first_tokens.values()
        result |= {f"median_{name}_seconds": statistics.median(waits), f"last_{name}_seconds": max(waits)}
        result[f"tokens_{name}"] = racer.num_computed_tokens
    return result | {"times_shorter": result["median_off_seconds"] / result["median_on_seconds"]}
