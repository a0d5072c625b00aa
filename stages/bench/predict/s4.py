"""Stage 4: the cost of a free seat, the wait for a long prompt, and the tokens that a small pool recomputes."""

import statistics
from functools import partial
from pathlib import Path
from typing import Any

from nanovllm.bench.harness import Scores, median_scores, take_turns
from nanovllm.bench.workload import mixed_tasks
from stages import s4_continuous_batching as s4
from stages.bench.engines import without_model
from stages.bench.timeline import Arrival, continuous, static
from stages.s3_paged_attention.llama import ModelConfig

POOL, SEATS = 8192, 8
LONG_PROMPT, CHUNKS, ROUNDS = 900, (32, 128, 1024), 3


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
    num_static = len(static(without_model("s3", **options), arrivals).steps)
    num_continuous = len(continuous(without_model("s4", **options), arrivals).steps)
    tokens = sum(arrival.num_output_tokens for arrival in arrivals)
    return {
        "static": num_static,
        "continuous": num_continuous,
        "least": -(-tokens // SEATS),
        "filled_static": tokens / (SEATS * num_static),
        "filled_continuous": tokens / (SEATS * num_continuous),
    }


def recomputed(model: Path, pool: int) -> dict[str, float]:
    """Count steps, preemptions and tokens in a pool of `pool` tokens, without a limit on seats."""
    run = continuous(without_model("s4", model=str(model), kv_cache_tokens=pool), workload(model))
    return {
        "steps": len(run.steps),
        "preemptions": run.num_preemptions,
        "tokens_computed": run.tokens_computed,
        "share": run.recomputed.total / run.tokens_computed,
        "of_prompts": run.recomputed.of_prompts / max(run.recomputed.total, 1),
    }


def cost_of_chunks(model: Path) -> dict[str, Scores]:
    """Return the medians of one_newcomer() for each limit on a step's tokens."""
    calls = {}
    for chunk in CHUNKS:
        llm = s4.LLM(model, dtype="float32", kv_cache_tokens=POOL, max_num_batched_tokens=chunk)
        calls[str(chunk)] = partial(one_newcomer, llm.llm_engine)
    return median_scores(take_turns(calls, ROUNDS, warm_ups=0))


def one_newcomer(engine: s4.LLMEngine, arrives: int = 25) -> Scores:
    """Let a long prompt arrive at step `arrives`, while SEATS sequences decode.

    Return the milliseconds to its first token, a decoding sequence's longest wait until then, and the time of a step
    before the prompt arrives.
    """
    others = [Arrival(0, [3 + i] * 16, 70) for i in range(SEATS)]
    run = continuous(engine, [*others, Arrival(arrives, [3] * LONG_PROMPT, 2)])
    decode = [step.seconds for step in run.steps if arrives - 20 <= step.start < arrives]
    during = []  # the steps from its arrival to its first token
    for step in run.steps[arrives:]:
        during.append(step.seconds)
        if SEATS in step.work and step.work[SEATS].sampled:
            break
    return {
        "steps": len(during),
        "ttft_ms": 1000 * sum(during),
        "gap_ms": 1000 * max(during),
        "decode_ms": 1000 * statistics.median(decode),
    }
