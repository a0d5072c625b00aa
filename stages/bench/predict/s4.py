"""Stage 4: what a free seat costs, who pays for a long prompt, and what a small pool computes again."""

import statistics
from functools import partial
from pathlib import Path
from typing import Any

from stages import s4_continuous_batching as s4
from stages.bench.engines import without_model
from stages.bench.harness import median_scores, take_turns
from stages.bench.predict.common import Answer, Shown, with_answers
from stages.bench.timeline import Arrival, continuous, static
from stages.bench.workloads import mixed_workload
from stages.s3_paged_attention.llama import ModelConfig

POOL, SEATS = 8192, 8
LONG_PROMPT, CHUNKS, ROUNDS = 900, (32, 128, 1024), 3


def answers(model: Path) -> dict[str, Any]:
    steps, chunks = steps_for_all(model), cost_of_chunks(model)
    again = {str(pool): recomputed(model, pool) for pool in (POOL, POOL // 2, POOL // 4)}
    numbers = {"steps": steps, "chunks": chunks, "again": again}
    show = Shown("predict.s4", numbers)
    return with_answers(numbers, [about_seats(show), about_chunks(show, chunks), about_the_pool(show)])


def about_seats(show: Shown) -> Answer:
    return Answer(
        f"32 requests, all there at once, {SEATS} seats; outputs have 16 to 256 tokens. How many steps do static "
        "batches take? And if whoever ends makes room for the next at once?",
        f"{show('steps.static', ',')}, and {show('steps.continuous', ',')}; {show('steps.least', ',')} is the least "
        f"that {SEATS} seats can do. In static batches {show('steps.filled_static', '.0%')} of the seats get a token "
        f"in a step, the others have ended and wait; now it is {show('steps.filled_continuous', '.0%')}. Nearly all "
        "of the rest is the end, when nobody waits any more.",
    )


def about_chunks(show: Shown, chunks: dict[str, dict[str, float]]) -> Answer:
    small, large = (chunks[str(chunk)] for chunk in (CHUNKS[0], CHUNKS[-1]))
    is_trade = small["gap_ms"] < large["gap_ms"] and small["ttft_ms"] > large["ttft_ms"]
    ms = {key: show(f"chunks.{key}_ms", ".0f") for key in ("1024.ttft", "1024.gap", "1024.decode", "32.ttft", "32.gap")}
    words = "Small chunks help those who are here, and the newcomer pays." if is_trade else "Here it was no trade."
    return Answer(
        f"{SEATS} sequences decode, and a prompt of {LONG_PROMPT} tokens comes. It can be computed in one step, or in "
        f"chunks, in steps of {CHUNKS[0]} tokens. Which is better for its time to first token, and which for the "
        "others' inter-token latency?",
        f"In one step its first token comes after {ms['1024.ttft']} ms, and the others wait {ms['1024.gap']} ms for "
        f"their next one. In steps of {CHUNKS[0]} tokens it takes {ms['32.ttft']} ms, and nobody waits longer than "
        f"{ms['32.gap']} ms. (Without a newcomer: {ms['1024.decode']} ms.) {words}",
    )


def about_the_pool(show: Shown) -> Answer:
    whole, half, quarter = (f"again.{POOL // part}" for part in (1, 2, 4))
    steps = [show(f"{pool}.steps", ",") for pool in (whole, half, quarter)]
    times = [show(f"{pool}.preemptions") for pool in (half, quarter)]
    return Answer(
        f"All 32 run at once in a pool of {POOL:,} tokens. In half the pool, what share of the tokens that go through "
        "the model went through it before? In a quarter?",
        f"{show(f'{half}.share', '.0%')}, and {show(f'{quarter}.share', '.0%')}. {times[0]} and {times[1]} times a "
        "sequence is preempted, and all that it had is computed again. It is the one that came last, so "
        f"{show(f'{half}.of_prompts', '.0%')} and {show(f'{quarter}.of_prompts', '.0%')} of that are prompts. Steps "
        f"grow faster than tokens, because fewer fit at a time: {steps[0]}, then {steps[1]}, then {steps[2]}.",
    )


def workload(model: Path) -> list[Arrival]:
    """The scoreboard's requests, all there at once."""
    requests = mixed_workload(ModelConfig.from_folder(model).vocab_size)
    return [Arrival(0, request.prompt_token_ids, request.num_output_tokens) for request in requests]


def steps_for_all(model: Path) -> dict[str, float]:
    """Steps for the workload with SEATS seats, and the share of the seats that get a token in a step. Counted."""
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
    """What the workload takes in a pool of so many tokens, without a bound on seats but the pool's. Counted."""
    run = continuous(without_model("s4", model=str(model), kv_cache_tokens=pool), workload(model))
    return {
        "steps": len(run.steps),
        "preemptions": run.num_preemptions,
        "tokens_computed": run.tokens_computed,
        "share": run.recomputed.total / run.tokens_computed,
        "of_prompts": run.recomputed.of_prompts / max(run.recomputed.total, 1),
    }


def cost_of_chunks(model: Path) -> dict[str, dict[str, float]]:
    """For each most of tokens in a step: milliseconds from a long prompt's arrival to its first token, the longest that
    one of SEATS others waits for a token meanwhile, and a step without a newcomer; the medians of ROUNDS.
    """
    engines = {
        chunk: s4.LLM(model, dtype="float32", kv_cache_tokens=POOL, max_num_batched_tokens=chunk).llm_engine
        for chunk in CHUNKS
    }
    calls = {str(chunk): partial(one_newcomer, engine) for chunk, engine in engines.items()}
    scores = median_scores(take_turns(calls, ROUNDS, warm_ups=0))
    return {str(chunk): scores[str(chunk)] for chunk in CHUNKS}


def one_newcomer(engine: s4.LLMEngine, arrives: int = 25) -> dict[str, float]:
    """SEATS sequences decode; a long prompt arrives at the step `arrives`."""
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
