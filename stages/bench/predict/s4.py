"""Stage 4: the cost of a free seat, the wait for a long prompt, and the tokens that a small pool recomputes."""

import statistics
from functools import partial
from pathlib import Path
from typing import Any

from nanovllm.bench.harness import Rounds, Scores, median_scores, with_spreads
from nanovllm.bench.workload import mixed_tasks
from stages import s4_continuous_batching as s4
from stages.bench.engines import without_model
from stages.bench.steady import until_steady
from stages.bench.timeline import Arrival, continuous, static
from stages.s3_paged_attention.llama import ModelConfig

POOL, SEATS = 8192, 8
LONG_PROMPT, CHUNKS, TURNS = 900, (32, 128, 1024), 5


def measure(model: Path) -> Scores:
    """Return steps, chunks, and the tokens that pools of three sizes recompute."""
    again = {str(pool): recomputed(model, pool) for pool in (POOL, POOL // 2, POOL // 4)}
    return {"steps": steps_for_all(model), "chunks": cost_of_chunks(model), "again": again}


def workload(model: Path) -> list[Arrival]:
    """Return the scoreboard's requests, all of which arrive at the start."""
    tasks = mixed_tasks(ModelConfig.from_folder(model).vocab_size)
    return [Arrival(0, task.prompt, task.num_output_tokens) for task in tasks]


def steps_for_all(model: Path) -> dict[str, float]:
    """Count the steps for the workload with SEATS seats, and the share of the seats that get a token in a step."""
    arrivals = workload(model)
    options: dict[str, Any] = {"model": str(model), "kv_cache_tokens": POOL, "max_num_seqs": SEATS}
    runs = {"static": static(without_model("s3", **options), arrivals)}
    runs["continuous"] = continuous(without_model("s4", **options), arrivals)
    tokens = sum(arrival.num_output_tokens for arrival in arrivals)
    filled = {f"filled_{name}": tokens / (SEATS * len(run.steps)) for name, run in runs.items()}
    return {name: len(run.steps) for name, run in runs.items()} | {"least": -(-tokens // SEATS)} | filled


def recomputed(model: Path, pool: int) -> dict[str, float]:
    """Count steps, preemptions and tokens in a pool of `pool` tokens, without a limit on seats."""
    run = continuous(without_model("s4", model=str(model), kv_cache_tokens=pool), workload(model))
    again, computed = run.recomputed, run.tokens_computed
    counts = {"steps": len(run.steps), "preemptions": run.num_preemptions, "tokens_computed": computed}
    return counts | {"share": again.total / computed, "of_prompts": again.of_prompts / max(again.total, 1)}


def cost_of_chunks(model: Path) -> Scores:
    """Return the medians of one_newcomer() for each limit on a step's tokens."""
    calls = {}
    for chunk in CHUNKS:
        llm = s4.LLM(model, dtype="float32", kv_cache_tokens=POOL, max_num_batched_tokens=chunk)
        calls[str(chunk)] = partial(one_newcomer, llm.llm_engine)
    rounds, turns = until_steady(calls, waits, least=TURNS, most=2 * TURNS)
    return median_scores(rounds) | {"turns": turns}


def waits(rounds: Rounds[str]) -> Scores:
    """Return the figures that have to be steady: the new prompt's wait, and the longest one of the others."""
    names = [(chunk, name) for chunk in rounds[0] for name in ("ttft_ms", "gap_ms")]
    return with_spreads([{f"{name} of {chunk}": each[chunk][name] for chunk, name in names} for each in rounds])


def one_newcomer(engine: s4.LLMEngine, arrives: int = 25) -> Scores:
    """Let a long prompt arrive at step `arrives`, while SEATS sequences decode.

    Return the milliseconds to its first token, a decoding sequence's longest wait until then, and the time of a step
    before the prompt arrives.
    """
    others = [Arrival(0, [3 + i] * 16, 70) for i in range(SEATS)]
    run = continuous(engine, [*others, Arrival(arrives, [3] * LONG_PROMPT, 2)])
    decode = [step.seconds for step in run.steps if arrives - 20 <= step.start < arrives]
    first_token = run.token_times()[SEATS][0]
    during = [step.seconds for step in run.steps if arrives < step.end <= first_token]  # from its arrival on
    times = {"ttft_ms": sum(during), "gap_ms": max(during), "decode_ms": statistics.median(decode)}
    return {"steps": len(during)} | {name: 1000 * seconds for name, seconds in times.items()}
