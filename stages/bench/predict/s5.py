"""Stage 5: blocks that samples share and copy, and tokens that a preempted sample computes again."""

import statistics
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from nanovllm.bench.harness import Rounds, Scores, median_scores, ratio, seconds_of, speed
from nanovllm.bench.workload import Task
from stages.bench.engines import by_sample, stage, without_model
from stages.bench.racing import computed_twice, serve
from stages.bench.steady import until_steady
from stages.bench.workloads import even_prompt

POOL, BLOCK, TURNS = 8192, 16, 5
PROMPT, ALIGNED, OUTPUT, N = 200, 208, 64, 8


def measure(model: Path) -> Scores:
    """Return counts of three prompts and of a preempted sample, and timed runs."""
    counts = {f"of_{length}": counted(model, length) for length in (PROMPT, ALIGNED, ALIGNED + 1)}
    held = counts[f"of_{PROMPT}"]
    return {
        **counts,
        "times": held["samples"]["blocks"] / held["alone"]["blocks"],
        "preempted": one_is_preempted(model),
        "runs": timed_runs(model, held["samples"]["copied"]),
    }


# ---- counted


def counted(model: Path, num_prompt_tokens: int) -> dict[str, dict[str, int]]:
    """Return the counts of one sample, of N samples, and of N requests."""
    task = Task(even_prompt(num_prompt_tokens), OUTPUT)
    workloads = {"alone": [task], "samples": [task._replace(n=N)], "requests": [task] * N}
    return {name: served(model, tasks) for name, tasks in workloads.items()}


def served(model: Path, tasks: Sequence[Task], pool: int = POOL, name: str = "s5") -> dict[str, int]:
    """Serve tasks, all at once, with an engine of stage `name` without a model. Return its counts."""
    engine = without_model(name, by_sample, model=str(model), kv_cache_tokens=pool, block_size=BLOCK)
    serve(name, engine, tasks)
    blocks = {"blocks": engine.kv_cache_manager.peak.held // BLOCK, "copied": engine.kv_cache.num_blocks_copied}
    runner, scheduler = engine.model_runner, engine.scheduler
    return blocks | {"preemptions": scheduler.num_preemptions, "tokens_computed": runner.num_tokens}


def one_is_preempted(model: Path, name: str = "s5") -> dict[str, int]:
    """Serve N samples in a pool of one block less than they hold in the end. Stage 6 answers the same question."""
    task = Task(even_prompt(PROMPT), OUTPUT, N)
    num_blocks = served(model, [task])["blocks"] - 1
    result = served(model, [task], BLOCK * num_blocks, name)
    assert result["preemptions"] == 1, f"{result['preemptions']} preemptions"
    twice = computed_twice(name, result["tokens_computed"], [task])
    return {"pool_blocks": num_blocks, "computed_twice": twice}


# ---- timed


def timed_runs(model: Path, blocks_copied: int) -> Scores:
    """Time N outputs of one prompt, as requests of stage 4 and as samples, which take turns."""
    options: dict[str, Any] = {"temperature": 1.0, "max_tokens": OUTPUT, "ignore_eos": True}
    seeds = [stage("s4").SamplingParams(seed=seed, **options) for seed in range(N)]
    samples = [stage("s5").SamplingParams(n=N, seed=0, **options)]
    prompt = even_prompt(PROMPT)
    llms = {name: stage(name).LLM(model, dtype="float32", kv_cache_tokens=POOL) for name in ("s4", "s5")}
    calls = {"requests": partial(one_run, llms["s4"], [prompt] * N, seeds)}
    calls["samples"] = partial(one_run, llms["s5"], [prompt], samples)

    def gain(rounds: Rounds[str]) -> Scores:
        return ratio(rounds, "samples", "requests", speed).named("gain")

    rounds, turns = until_steady(calls, gain, least=TURNS, most=4 * TURNS)
    result = median_scores(rounds)
    result["samples"] |= {"blocks_copied": blocks_copied}
    return {**result, **gain(rounds), "turns": turns}


def one_run(llm: Any, prompts: list[list[int]], params: list[Any]) -> Scores:
    """Return the speed, the time to first token, and the peak of the pool."""
    runner, outputs = llm.model_runner, list[Any]()
    steps, tokens = runner.num_steps, runner.num_tokens
    seconds = seconds_of(lambda: outputs.extend(llm.generate(prompts, params)))
    waits = [output.metrics.first_token_time - output.metrics.arrival_time for output in outputs]
    times = {"tokens_per_second": N * OUTPUT / seconds, "first_token_seconds": statistics.median(waits)}
    counts = {"steps": runner.num_steps - steps, "tokens_computed": runner.num_tokens - tokens}
    return counts | times | {"blocks": llm.peak.held // BLOCK}
