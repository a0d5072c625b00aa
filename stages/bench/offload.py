"""Offload: what a pool on the host is worth, stage 7 against stage 6, both with the prefix cache on.

`pools`: a third of what all requests hold in the end, and a host pool four times as large as the device's. Stage 6 and
stage 7 with its policies "load", "recompute" and "auto" serve the same requests side by side, on the model of 135M
parameters. Many requests fit as they begin and few as they end, so many are preempted. How many tokens are computed
twice is counted.

`first_token`: the time to first token of a prompt whose first 16 to 1,024 tokens were evicted to the host, against a
prompt of the same length computed anew; the engine is otherwise idle.

`talks`: conversations that pause while the others talk, in stages 6 and 7 without a model: tokens computed and found.

About two minutes on two cores.
"""

import random
import time
from argparse import Namespace
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

from stages.bench.engines import stage, without_model
from stages.bench.harness import Scores, median_scores, ratio, take_turns, with_spreads
from stages.bench.models import SHAPE_135M, STORYTELLER, model_135m
from stages.bench.racing import Racer, computed_twice, race, sampling_params, serve
from stages.bench.results import machine
from stages.bench.workloads import Request, growing_workload, random_tokens

BLOCK_SIZE, TIMES_ON_HOST, PARTS = 16, 4, 3
NUM_REQUESTS, PROMPT, OUTPUT, SPREAD = 16, 64, 96, 32
PREFIXES, TAIL, NUM_ROUNDS = (16, 64, 256, 512, 1024), 16, 7
POOL_ROUNDS = 2
TALKS, TURNS, TURN = 8, 4, 48
POLICIES = ("load", "recompute", "auto")


def measure(args: Namespace) -> dict[str, Any]:
    folder = model_135m()
    first = {str(length): measure_first_token(folder, args.dtype, length) for length in PREFIXES}
    pools = measure_pools(folder, args.dtype)
    talks = {policy: count_talks(policy) for policy in ("s6", "load")}
    return {"offload": {"machine": machine(args.dtype), "pools": pools, "first_token": first, "talks": talks}}


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
    """Scores of stage 6 and of each policy; how fast "auto" is over stage 6, and over "load"."""
    requests, pool = workload(SHAPE_135M.vocab_size)
    racers = {
        policy: partial(Racer, stage_of(policy), folder, requests, dtype=dtype, **options_of(policy, pool))
        for policy in ("s6", *POLICIES)
    }
    rounds = []
    for number in range(POOL_ROUNDS):
        finished = race(racers, f"a pool of a third, round {number + 1} of {POOL_ROUNDS}")
        rounds.append({policy: row_of(policy, racer, requests) for policy, racer in finished.items()})
    speeds = [{policy: row["tokens_per_second"] for policy, row in each.items()} for each in rounds]
    share = pool / sum(request.num_tokens for request in requests)
    return {
        **median_scores(rounds),
        **{"requests": len(requests), "pool_tokens": pool, "share": share},
        **ratio(speeds, "auto", "s6").named("auto_over_s6"),
        **ratio(speeds, "auto", "load").named("auto_over_load"),
    }


def row_of(policy: str, racer: Racer, requests: list[Request]) -> Scores:
    """What a run that is over has shown; of "auto" the speeds that it has measured, too."""
    row = racer.scores()
    row |= counts(stage_of(policy), racer.llm.llm_engine, row["tokens_computed"], requests)
    if policy == "auto":
        model = racer.llm.llm_engine.cost_model
        row |= {"bytes_per_second": model.load_bytes_per_second, "prefill_tokens_per_second": model.tokens_per_second}
        row["store_bytes_per_second"] = model.store_bytes_per_second
    return row


def counts(name: str, engine: Any, tokens_computed: int, requests: list[Request]) -> dict[str, int]:
    """Return what a run computed twice and moved, of an engine that has served all `requests`."""
    found = {
        "preemptions": engine.scheduler.num_preemptions,
        "computed_twice": computed_twice(name, tokens_computed, requests),
    }
    if name == "s7":
        tier = engine.host_tier
        found |= {"blocks_stored": tier.num_blocks_stored, "blocks_loaded": tier.num_blocks_loaded}
    return found


def count_without_model(policy: str) -> dict[str, int]:
    """The counts of a run of the same requests without a model: the same on every machine."""
    requests, pool = workload(vocab_size=4096)
    name = stage_of(policy)
    engine = without_model(name, model=str(STORYTELLER), **options_of(policy, pool))
    serve(name, engine, requests)
    runner = engine.model_runner
    return {"steps": runner.num_steps, **counts(name, engine, runner.num_tokens, requests)}


# ---- conversations that pause


def count_talks(policy: str) -> dict[str, int]:
    """TALKS conversations of TURNS turns, turn after turn, each alone in the engine. A turn's prompt is all of the talk
    so far and TURN new tokens; the answer has as many. The pool has a third of what all talks hold in the end.
    """
    rng, name = random.Random(0), stage_of(policy)
    pool = TALKS * TURNS * 2 * TURN // PARTS
    engine = without_model(name, model=str(STORYTELLER), **options_of(policy, pool))
    talks: list[list[int]] = [[] for _ in range(TALKS)]
    for turn in range(TURNS):
        for number, talk in enumerate(talks):
            talk += random_tokens(rng, 4096, TURN)
            request = Request(list(talk), TURN)
            engine.add_request(f"{number}, {turn}", request.prompt_token_ids, sampling_params(name, request))
            while engine.has_unfinished_requests():
                outputs = engine.step()
            talk += outputs[0].outputs[0].token_ids
    runner, stats = engine.model_runner, engine.kv_cache_manager.prefix_cache_stats
    return {"tokens_computed": runner.num_tokens, "tokens_hit": stats.hits, "steps": runner.num_steps}


# ---- a prefix on the host


class Asker:
    """An idle engine of stage 7, in whose pool one prompt fits at a time: each prompt sends the one before to the host.

    A call serves the next prompt and returns the seconds until its first token.
    """

    def __init__(self, folder: Path, dtype: str, prompts: Any, pool: int) -> None:
        """`prompts` is an iterator that never ends."""
        options = options_of("load", pool) | {"max_model_len": pool + 1}  # room for the one token that is sampled
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
        return self._engine.host_tier.num_blocks_loaded


def measure_first_token(folder: Path, dtype: str, length: int) -> dict[str, Any]:
    """Seconds to the first token, `length` tokens loaded or computed; and how many times shorter the first is."""
    rng = random.Random(0)
    prefixes = cycle([random_tokens(rng, SHAPE_135M.vocab_size, length) for _ in range(2)])
    again = (prefix + random_tokens(rng, SHAPE_135M.vocab_size, TAIL) for prefix in prefixes)
    never_seen = (random_tokens(rng, SHAPE_135M.vocab_size, length + TAIL) for _ in cycle([0]))
    loaded, computed = (Asker(folder, dtype, prompts, length + TAIL) for prompts in (again, never_seen))
    for _ in range(2):
        loaded()  # each prefix once
    before = loaded.num_blocks_loaded
    rounds = take_turns({"loaded": loaded, "computed": computed}, NUM_ROUNDS, title=f"{length} tokens on the host")
    num_asked = NUM_ROUNDS + 1
    blocks = loaded.num_blocks_loaded - before
    assert blocks == num_asked * length // BLOCK_SIZE, f"{blocks} blocks loaded for {num_asked} prompts"
    assert computed.num_blocks_loaded == 0, "a prompt that was never seen is loaded"
    seconds = with_spreads([{f"{name}_seconds": each[name] for name in each} for each in rounds])
    return seconds | ratio(rounds, "computed", "loaded")._asdict()
