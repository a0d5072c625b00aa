"""The offload table: the gain of a pool on the host, stage 7 against stage 6, both with the prefix cache on.

`pools`: the pool holds a third of all requests' tokens, and the host's pool is four times as large. Stage 6 and stage 7
with the policies "load", "recompute" and "auto" serve the same requests side by side, on the model of 135M parameters.
Many requests fit when they begin, but few fit when they end, so many are preempted. Tokens computed twice are counted.

`first_token`: the time to first token of a prompt whose first 16 to 1,024 tokens were evicted to the host, against a
new prompt of the same length. The engine is otherwise idle.

`talks`: conversations that pause while others continue, in stages 6 and 7 without a model: tokens computed, tokens hit.
"""

import random
from argparse import Namespace
from collections.abc import Iterator
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

from nanovllm.bench.harness import Rounds, Scores, median_scores, ratio, seconds_of, with_spreads
from nanovllm.bench.workload import Task, random_tokens
from stages.bench.engines import stage, without_model
from stages.bench.models import SHAPE_135M, STORYTELLER, model_135m
from stages.bench.racing import Racer, counts, race, serve
from stages.bench.results import machine
from stages.bench.steady import until_steady

BLOCK_SIZE, TIMES_ON_HOST, PARTS = 16, 4, 3
NUM_REQUESTS, PROMPT, OUTPUT, SPREAD = 16, 64, 96, 32
PREFIXES, TAIL, LEAST_TURNS, MOST_TURNS = (16, 64, 256, 512, 1024), 16, 10, 20
POOL_ROUNDS = 2
CONVERSATIONS, TURNS, TURN = 8, 4, 48
POLICIES = ("load", "recompute", "auto")


def measure(args: Namespace) -> dict[str, Any]:
    """Measure all three parts."""
    folder = model_135m()
    first = {str(length): measure_first_token(folder, args.dtype, length) for length in PREFIXES}
    pools = measure_pools(folder, args.dtype)
    talks = {policy: count_conversations(policy) for policy in ("s6", "load")}
    return {"offload": {"machine": machine(args.dtype), "pools": pools, "first_token": first, "talks": talks}}


# ---- a pool of a third


def workload(vocab_size: int) -> tuple[list[Task], int]:
    """Return the tasks, whose outputs vary by SPREAD, and the size of a pool that holds a third of their tokens."""
    rng = random.Random(0)
    lengths = [OUTPUT + 7 * number % (SPREAD + 1) for number in range(NUM_REQUESTS)]
    tasks = [Task(random_tokens(rng, vocab_size, PROMPT), length) for length in lengths]
    return tasks, sum(task.num_tokens for task in tasks) // PARTS


def options_of(policy: str, pool: int) -> dict[str, Any]:
    """Return options of EngineConfig. The policy "s6" stands for stage 6."""
    options: dict[str, Any] = {"kv_cache_tokens": pool, "block_size": BLOCK_SIZE, "enable_prefix_caching": True}
    host = {"offload_policy": policy, "kv_offloading_tokens": TIMES_ON_HOST * pool}
    return options if policy == "s6" else options | host


def stage_of(policy: str) -> str:
    """Return the stage that has the policy."""
    return "s6" if policy == "s6" else "s7"


def measure_pools(folder: Path, dtype: str) -> dict[str, Any]:
    """Return the scores and counts of stage 6 and of each policy."""
    tasks, pool = workload(SHAPE_135M.vocab_size)
    rounds: list[dict[str, Scores]] = []
    for number in range(POOL_ROUNDS):
        racers = {}
        for policy in ("s6", *POLICIES):
            llm = stage(stage_of(policy)).LLM(folder, dtype=dtype, **options_of(policy, pool))
            racers[policy] = Racer(stage_of(policy), llm, tasks)
        race(racers, f"a pool of a third, round {number + 1} of {POOL_ROUNDS}")
        rounds.append({policy: racer.scores() for policy, racer in racers.items()})
        for policy, row in rounds[-1].items():
            row |= counts(stage_of(policy), racers[policy].llm.llm_engine, row["tokens_computed"], tasks)
    return median_scores(rounds)


def count_without_model(policy: str) -> dict[str, int]:
    """Return the counts for the same requests without a model: they are the same on every machine."""
    tasks, pool = workload(vocab_size=4096)
    engine = without_model(name := stage_of(policy), model=str(STORYTELLER), **options_of(policy, pool))
    serve(name, engine, tasks)
    return {"steps": engine.model_runner.num_steps, **counts(name, engine, engine.model_runner.num_tokens, tasks)}


# ---- conversations that pause


def count_conversations(policy: str) -> dict[str, int]:
    """Serve CONVERSATIONS conversations of TURNS turns, turn after turn, each alone in the engine.

    A turn's prompt is the whole conversation and TURN new tokens, and the answer has as many. The pool holds a third of
    the tokens of all conversations.
    """
    rng, name = random.Random(0), stage_of(policy)
    pool = CONVERSATIONS * TURNS * 2 * TURN // PARTS
    engine = without_model(name, model=str(STORYTELLER), **options_of(policy, pool))
    conversations: list[list[int]] = [[] for _ in range(CONVERSATIONS)]
    for turn in range(TURNS):
        for number, tokens in enumerate(conversations):
            tokens += random_tokens(rng, 4096, TURN)
            [output] = serve(name, engine, [Task(list(tokens), TURN)], prefix=f"{number}, {turn}: ")
            tokens += output.outputs[0].token_ids
    runner, stats = engine.model_runner, engine.kv_cache_manager.prefix_cache_stats
    return {"tokens_computed": runner.num_tokens, "tokens_hit": stats.hits, "steps": runner.num_steps}


# ---- a prefix on the host


def measure_first_token(folder: Path, dtype: str, length: int, **more: Any) -> dict[str, Any]:
    """Return the seconds to first token with `length` tokens loaded or computed, and their ratio.

    Only one prompt fits in each engine's pool, so each prompt sends the previous one to the host. `more` are options of
    EngineConfig.
    """
    options = options_of("load", length + TAIL) | {"max_model_len": length + TAIL + 1}  # room for the sampled token
    loaded, computed = (stage("s7").LLM(folder, dtype=dtype, **options, **more).llm_engine for _ in range(2))
    rng, vocab_size = random.Random(0), loaded.model_config.vocab_size
    prefixes = cycle([random_tokens(rng, vocab_size, length) for _ in range(2)])
    again = (prefix + random_tokens(rng, vocab_size, TAIL) for prefix in prefixes)
    new = (random_tokens(rng, vocab_size, length + TAIL) for _ in cycle([0]))
    calls = {"loaded": partial(first_token, loaded, again), "computed": partial(first_token, computed, new)}
    for _ in range(2):
        calls["loaded"]()  # each prefix once
    before = loaded.host_tier.num_blocks_loaded
    rounds, turns = until_steady(calls, gain, least=LEAST_TURNS, most=MOST_TURNS, title=f"{length} tokens on the host")
    blocks = loaded.host_tier.num_blocks_loaded - before
    assert blocks == (turns + 1) * length // BLOCK_SIZE, f"{blocks} blocks loaded"
    assert computed.host_tier.num_blocks_loaded == 0, "a new prompt was loaded"
    seconds = with_spreads([{f"{name}_seconds": each[name] for name in each} for each in rounds])
    return seconds | gain(rounds) | {"turns": turns}


def gain(rounds: Rounds[str]) -> Scores:
    """Return how many times sooner a loaded prompt has its first token."""
    return ratio(rounds, "computed", "loaded").named("ratio")


def first_token(engine: Any, prompts: Iterator[list[int]]) -> float:
    """Serve the next prompt, and return the seconds until its first token."""
    task = Task(next(prompts), 1)
    return seconds_of(lambda: serve("s7", engine, [task]))
