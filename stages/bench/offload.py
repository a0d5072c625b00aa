"""Offload: what a pool on the host is worth, stage 7 against stage 6, both with the prefix cache on.

`pools`: a third of what all requests hold in the end, and a host pool four times as large as the device's. Stage 6 and
stage 7 with its policies "load", "recompute" and "auto" serve the same requests side by side, on the model of 135M
parameters. Many requests fit as they begin and few as they end, so many are preempted. How many tokens are computed
twice is counted.

`first_token`: the time to first token of a prompt whose first 512 tokens were evicted to the host, against the same
prompt computed anew; the engine is otherwise idle.

About three minutes on two cores.
"""

import random
import time
from argparse import Namespace
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

from stages.bench.engines import engine_class, stage
from stages.bench.harness import medians, ratio, take_turns
from stages.bench.models import SHAPE_135M, STORYTELLER, model_135m
from stages.bench.racing import Racer, computed_twice, race, sampling_params
from stages.bench.results import machine
from stages.bench.workloads import Request, growing_workload, random_tokens

BLOCK_SIZE, TIMES_ON_HOST, PARTS = 16, 4, 3
NUM_REQUESTS, PROMPT, OUTPUT, SPREAD = 16, 64, 96, 32
PREFIX, TAIL, NUM_ROUNDS = 512, 16, 7
POLICIES = ("load", "recompute", "auto")


def measure(args: Namespace) -> dict[str, Any]:
    folder = model_135m()
    found = {"pools": measure_pools(folder, args.dtype), "first_token": measure_first_token(folder, args.dtype)}
    return {"offload": {"machine": machine(args.dtype), **found}}


# ---- a pool of a third


def workload(vocab_size: int) -> tuple[list[Request], int]:
    """The requests, and the tokens of a pool of a third of what they hold in the end."""
    requests = growing_workload(vocab_size, NUM_REQUESTS, PROMPT, OUTPUT, SPREAD)
    return requests, sum(request.num_tokens for request in requests) // PARTS


def options_of(policy: str, pool: int) -> dict[str, Any]:
    """EngineConfig's; "s6" is stage 6."""
    options: dict[str, Any] = {"kv_cache_tokens": pool, "block_size": BLOCK_SIZE, "enable_prefix_caching": True}
    host = {"offload_policy": policy, "kv_offloading_tokens": TIMES_ON_HOST * pool}
    return options if policy == "s6" else options | host


def stage_of(policy: str) -> str:
    return "s6" if policy == "s6" else "s7"


def measure_pools(folder: Path, dtype: str) -> dict[str, Any]:
    """Scores of stage 6 and of each policy; how fast "auto" is over stage 6, and over the better of the other two."""
    requests, pool = workload(SHAPE_135M.vocab_size)
    racers = {
        policy: partial(Racer, stage_of(policy), folder, requests, dtype=dtype, **options_of(policy, pool))
        for policy in ("s6", *POLICIES)
    }
    finished = race(racers, "a pool of a third")
    found: dict[str, Any] = {
        policy: {**racer.scores(), **counts(stage_of(policy), racer.llm.llm_engine, requests)}
        for policy, racer in finished.items()
    }
    speeds = {policy: found[policy]["tokens_per_second"] for policy in found}
    cost_model = finished["auto"].llm.llm_engine.cost_model
    return found | {
        "requests": len(requests),
        "pool_tokens": pool,
        "share": pool / sum(request.num_tokens for request in requests),
        "auto_over_s6": speeds["auto"] / speeds["s6"],
        "auto_over_best": speeds["auto"] / max(speeds["load"], speeds["recompute"]),
        "bytes_per_second": cost_model.bytes_per_second,
        "prefill_tokens_per_second": cost_model.tokens_per_second,
    }


def counts(name: str, engine: Any, requests: list[Request]) -> dict[str, int]:
    """What a run computed twice and moved, of an engine that has served all `requests`."""
    found = {
        "preemptions": engine.scheduler.num_preemptions,
        "computed_twice": computed_twice(name, engine.model_runner.num_tokens, requests),
    }
    if name == "s7":
        host = engine.host_kv_cache
        found |= {"blocks_stored": host.num_blocks_stored, "blocks_loaded": host.num_blocks_loaded}
    return found


def count_without_model(policy: str) -> dict[str, int]:
    """The counts of a run of the same requests without a model: the same on every machine."""
    requests, pool = workload(vocab_size=4096)
    name = stage_of(policy)
    engine = engine_class(name)(model=str(STORYTELLER), **options_of(policy, pool))
    for number, request in enumerate(requests):
        engine.add_request(str(number), request.prompt_token_ids, sampling_params(name, request))
    while engine.has_unfinished_requests():
        engine.step()
    return {"steps": engine.model_runner.num_steps, **counts(name, engine, requests)}


# ---- a prefix on the host


class Asker:
    """An idle engine of stage 7, in whose pool one prompt fits at a time: each prompt sends the one before to the host.

    A call serves the next prompt and returns the seconds until its first token.
    """

    def __init__(self, folder: Path, dtype: str, prompts: Any) -> None:
        """`prompts` is an iterator that never ends."""
        options = options_of("load", pool=PREFIX + TAIL)
        self._engine = stage("s7").LLM(folder, dtype=dtype, **options).llm_engine
        self._prompts, self._num_asked = prompts, 0

    def __call__(self) -> float:
        prompt = next(self._prompts)
        self._num_asked += 1
        started = time.perf_counter()
        self._engine.add_request(str(self._num_asked), prompt, sampling_params("s7", Request(prompt, 1)))
        while self._engine.has_unfinished_requests():
            self._engine.step()
        return time.perf_counter() - started

    @property
    def num_blocks_loaded(self) -> int:
        return self._engine.host_kv_cache.num_blocks_loaded


def measure_first_token(folder: Path, dtype: str) -> dict[str, float]:
    """Seconds to the first token, loaded and computed, medians; and how many times shorter the first is."""
    rng = random.Random(0)
    prefixes = cycle([random_tokens(rng, SHAPE_135M.vocab_size, PREFIX) for _ in range(2)])
    again = (prefix + random_tokens(rng, SHAPE_135M.vocab_size, TAIL) for prefix in prefixes)
    never_seen = (random_tokens(rng, SHAPE_135M.vocab_size, PREFIX + TAIL) for _ in cycle([0]))
    loaded, computed = Asker(folder, dtype, again), Asker(folder, dtype, never_seen)
    for _ in range(2):
        loaded()  # each prefix once
    before = loaded.num_blocks_loaded
    rounds = take_turns({"loaded": loaded, "computed": computed}, NUM_ROUNDS, title="a prefix on the host")
    num_asked = NUM_ROUNDS + 1
    blocks = loaded.num_blocks_loaded - before
    assert blocks == num_asked * PREFIX // BLOCK_SIZE, f"{blocks} blocks loaded for {num_asked} prompts"
    assert computed.num_blocks_loaded == 0, "a prompt that was never seen is loaded"
    seconds = medians(rounds)
    return {
        "loaded_seconds": seconds["loaded"],
        "computed_seconds": seconds["computed"],
        **{f"times_{name}": value for name, value in ratio(rounds, "computed", "loaded")._asdict().items()},
    }
