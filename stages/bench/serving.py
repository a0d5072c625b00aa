"""The serving table: stage 4, stage 3 and transformers on the model of 135M parameters.

32 requests of 16 to 256 tokens arrive together, at a pool of 2,048. A round takes about 75 seconds on two cores.

`peers`: transformers serves them in the same run, by `generate` on one left-padded batch of all 32, and by the
continuous batching behind `generate_batch`. Their memory is not limited to the pool, so stage 4 is measured once more
with room for all. Only tokens that a request needs count.
"""

import itertools
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from nanovllm.bench.harness import Scores, median_scores, ratio, with_spreads
from nanovllm.bench.peer import TRANSFORMERS, PeerProcess
from nanovllm.bench.workers.worker import Settings
from nanovllm.bench.workload import Task, mixed_tasks
from stages.bench.engines import stage
from stages.bench.models import SHAPE_135M, bytes_per_token, model_135m
from stages.bench.racing import Racer, race
from stages.bench.results import machine

SMALL_POOL, ROOMY_POOL = 2048, 16384  # the second has room for all requests, and for tokens cached before
STAGES, NUM_ROUNDS = ("s3", "s4"), 2


def measure(args: Namespace) -> dict[str, Any]:
    """Measure the stages and the peers."""
    tasks, options = mixed_tasks(SHAPE_135M.vocab_size), {"dtype": args.dtype, "kv_cache_tokens": SMALL_POOL}
    serve_once(STAGES, model_135m(), mixed_tasks(SHAPE_135M.vocab_size, 2, high=32), options)  # warms up
    rounds = [serve_once(STAGES, model_135m(), tasks, options) for _ in tqdm(range(NUM_ROUNDS), "serving", leave=False)]
    result = compare(rounds)
    result["peers"] = measure_peers(STAGES[-1], model_135m(), tasks, args.dtype)
    num_tokens = sum(task.num_output_tokens for task in tasks)
    return {"serving": {"machine": machine(args.dtype), "output_tokens": num_tokens, **result}}


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
    speeds = [{name: scores["tokens_per_second"] for name, scores in each.items()} for each in rounds]
    for before, after in itertools.pairwise(rounds[0]):
        result[f"{after}_over_{before}"] = {"rounds": len(rounds), **ratio(speeds, after, before).as_ratio()}
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
    longest = max(task.num_tokens for task in tasks)
    settings = Settings(
        model=str(folder),
        dtype=dtype,
        threads=torch.get_num_threads(),
        max_model_len=longest,
        max_num_seqs=len(tasks),
        kv_cache_bytes=len(tasks) * longest * bytes_per_token(SHAPE_135M, getattr(torch, dtype)),
    )
    with closing(PeerProcess(TRANSFORMERS._replace(name=name), settings)) as process:
        process.serve([task.shortened(2) for task in tasks[:2]])  # warms up
        runs = [process.serve(tasks) for _ in range(NUM_ROUNDS)]
    steps = {"steps": max(task.num_output_tokens for task in tasks)} if name == "transformers" else {}
    return [{"tokens_per_second": run.tokens_per_second, "seconds": run.seconds, **steps} for run in runs]
