"""Stage 7: what a swap takes and what recompute takes, a pool cut to a third, and eight samples that are swapped."""

import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from notebooks.tiers import Ask, swap_samples
from stages import s7_cpu_offload as s7
from stages.decode import random_model
from stages.predict.common import Answer, with_answers
from stages.s1_contiguous_cache.llama import ModelConfig
from stages.workload import mixed_workload

SHORT, LONG, BLOCK_SIZE = 16, 1024, 16  # tokens; tokens; slots
REQUESTS, ROUNDS = 12, 5
SAMPLES, PROMPT = Ask(200, 40, n=8), 200


def answers(model: Path) -> dict[str, Any]:
    costs = swap_against_recompute(model)
    cut = {name: serve(model, policy, parts) for name, policy, parts in CUTS}
    swapped = samples(model)
    entries = [about_cost(costs), about_the_pool(cut), about_samples(swapped)]
    return with_answers({"costs": costs, "cut": cut, "samples": swapped}, entries)


CUTS = (("whole", "recompute", 1), ("recompute", "recompute", 3), ("swap", "swap", 3))  # a pool of one in so many parts


def about_cost(costs: dict[str, float]) -> Answer:
    times = [costs[f"{name}_{length}_ms"] for length in (SHORT, LONG) for name in ("swap", "recompute")]
    few, many = (costs[f"recompute_{n}_ms"] / costs[f"swap_{n}_ms"] for n in (SHORT, LONG))
    return Answer(
        f"A preempted request has {SHORT} tokens, or {LONG:,}, in float32 on a CPU. What takes longer: to copy its "
        "keys and values out and in again, or to compute them again? By how much, for each length?",
        f"To compute them: {times[1]:.1f} ms against {times[0]:.2f} ms for {SHORT} tokens, {few:.0f} times as long; "
        f"{times[3]:,.0f} ms against {times[2]:.1f} ms for {LONG:,}, {many:.0f} times. Both grow about linearly, so "
        "the winner is mostly a ratio of two speeds. Length matters where one of them has a fixed cost: a step reads "
        "all weights for however few tokens.",
    )


def about_the_pool(cut: dict[str, dict[str, float]]) -> Answer:
    whole, again, swap = (cut[name] for name in ("whole", "recompute", "swap"))
    speeds = [run["tokens_per_second"] / whole["tokens_per_second"] for run in (again, swap)]
    return Answer(
        f"{REQUESTS} requests have a pool with room for all of them, then one of a third of that. What is left of the "
        "tokens a second, if preempted requests are computed again? And if they are swapped?",
        f"{speeds[0]:.0%}, and {speeds[1]:.0%}. There are {again['preemptions']:.0f} preemptions, and "
        f"{again['computed_twice']:,.0f} tokens are computed twice; swapped, {swap['computed_twice']:.0f}. What both "
        f"lose is company: fewer run at a time, and {whole['steps']:.0f} steps become {again['steps']:.0f} and "
        f"{swap['steps']:.0f}. A host's pool gives back work, not room.",
    )


def about_samples(swapped: dict[str, int]) -> Answer:
    return Answer(
        f"Eight samples of one prompt of {PROMPT} tokens, which have {swapped['outputs']} more each, are preempted and "
        f"swapped. How often does the prompt go to the host? How many blocks of {BLOCK_SIZE} move, each way?",
        f"Once. {swapped['stored']} blocks go and {swapped['loaded']} come back, where the eight tables have "
        f"{swapped['entries']} entries: the {swapped['shared']} full blocks of the prompt are in all of them. What was "
        "shared is shared again afterwards, with the same reference counts.",
    )


def swap_against_recompute(model: Path) -> dict[str, float]:
    """Milliseconds for both ways and both lengths, medians: storyteller's shape, random weights, more positions."""
    shape = replace(ModelConfig.from_folder(model), max_position_embeddings=2 * LONG)
    options: dict[str, Any] = {"dtype": "float32", "kv_cache_tokens": 2 * LONG, "max_num_batched_tokens": LONG}
    with random_model(shape) as folder:
        engine = s7.LLM(folder, preemption="swap", block_size=BLOCK_SIZE, **options).llm_engine
    calls = {}
    for length in (SHORT, LONG):
        calls[f"swap_{length}_ms"] = partial(there_and_back, engine, length // BLOCK_SIZE)
        calls[f"recompute_{length}_ms"] = partial(prefill, engine, length)
    for call in calls.values():
        call()  # warms up
    times = [{name: milliseconds(call) for name, call in calls.items()} for _ in range(ROUNDS)]
    return {name: statistics.median(each[name] for each in times) for name in calls}


def milliseconds(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return 1000 * (time.perf_counter() - started)


def there_and_back(engine: s7.LLMEngine, num_blocks: int) -> None:
    assert engine.host_pool is not None
    copies = {block: block for block in range(num_blocks)}
    engine.host_pool.store(copies).wait()
    engine.host_pool.load(copies).wait()


def prefill(engine: s7.LLMEngine, num_tokens: int) -> None:
    """In one step, as if nothing of it had been computed."""
    [seq] = engine.input_processor.process("", [3] * num_tokens, s7.SamplingParams(temperature=0.0))
    engine.kv_cache_manager.allocate(seq)
    engine.model_runner.run([(seq, num_tokens)])
    engine.kv_cache_manager.free(seq)


def serve(model: Path, policy: str, parts: int) -> dict[str, float]:
    """The mixed workload from one in so many parts of the pool that it needs."""
    requests = mixed_workload(ModelConfig.from_folder(model).vocab_size, REQUESTS, high=192)
    needed = sum(-(-(len(r.prompt_token_ids) + r.num_output_tokens) // BLOCK_SIZE) for r in requests)
    options: dict[str, Any] = {"enable_prefix_caching": False, "swap_space_tokens": needed * BLOCK_SIZE}
    pool = BLOCK_SIZE * (needed // parts)
    llm = s7.LLM(model, dtype="float32", preemption=policy, kv_cache_tokens=pool, block_size=BLOCK_SIZE, **options)
    params = [s7.SamplingParams(temperature=0.0, max_tokens=r.num_output_tokens, ignore_eos=True) for r in requests]
    seconds = milliseconds(lambda: llm.generate([r.prompt_token_ids for r in requests], params)) / 1000
    once = sum(len(r.prompt_token_ids) + r.num_output_tokens - 1 for r in requests)
    return {
        "tokens_per_second": sum(r.num_output_tokens for r in requests) / seconds,
        "steps": llm.model_runner.num_steps,
        "preemptions": llm.llm_engine.scheduler.num_preemptions,
        "computed_twice": llm.model_runner.num_tokens - once,
    }


def samples(model: Path) -> dict[str, int]:
    num_steps = 24
    options: dict[str, Any] = {"kv_cache_tokens": 8192, "block_size": BLOCK_SIZE, "enable_prefix_caching": False}
    swapped = swap_samples(SAMPLES, num_steps, model=str(model), dtype="float32", **options)
    return {**swapped._asdict(), "outputs": num_steps, "shared": PROMPT // BLOCK_SIZE}
