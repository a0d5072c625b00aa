"""The two_engines table: what a long prompt costs those who decode, and how long it takes itself. Of more_two_engines.

Four sequences of the storyteller decode while prompts of 700 tokens arrive, one after the other. One engine computes
them in chunks, with several limits on the tokens of a step; or a second engine does, in a process of its own. All have
the same cores: one engine has all of them, and each of two has half. They take turns.
"""

import itertools
import os
import random
import statistics
import time
from argparse import Namespace
from collections.abc import Iterator
from functools import partial
from typing import Any
from unittest.mock import patch

import torch

from nanovllm.bench.harness import Rounds, Scores, median_scores, with_spreads
from nanovllm.bench.workload import random_tokens
from stages.bench.engines import stage
from stages.bench.models import STORYTELLER
from stages.bench.results import machine
from stages.bench.steady import NUM_ROUNDS, until_steady
from stages.bench.workloads import even_prompt

BRANCH, TWO = "more_two_engines", "two"
CHUNKS = (512, 128, 64, 32)
NUM_DECODES, SHORT, PROMPT, NUM_PROMPTS = 4, 16, 700, 3
PAUSE = 8  # tokens of the others before a prompt arrives: few, so that p95 is a step with a chunk of the prompt


def measure(args: Namespace) -> dict[str, Any]:
    """Measure all engines in turns."""
    cores = torch.get_num_threads()
    half = max(cores // 2, 1)
    engines = {str(chunk): engine_of(max_num_batched_tokens=chunk, offload_policy="recompute") for chunk in CHUNKS}
    with patch.dict(os.environ, OMP_NUM_THREADS=str(half)):  # of the second process
        engines[TWO] = engine_of(disaggregated_prefill=True)
    try:
        prompts = fresh_prompts()
        engines[TWO].generate(next(prompts))  # waits until the second process has started
        calls = {key: partial(turn, llm, prompts, half if key == TWO else cores) for key, llm in engines.items()}
        rounds, turns = until_steady(calls, waits, least=NUM_ROUNDS, most=2 * NUM_ROUNDS, title="two engines")
    finally:
        engines[TWO].close()
        torch.set_num_threads(cores)
    threads = {"one_engine": cores, "each_of_two": half}
    scores = {"machine": machine("float32"), "threads": threads, "engines": median_scores(rounds), "turns": turns}
    return {"two_engines": scores}


def engine_of(**options: Any) -> Any:
    """Return an LLM of the branch."""
    return stage(BRANCH).LLM(STORYTELLER, dtype="float32", **options)


def fresh_prompts() -> Iterator[list[int]]:
    """Yield prompts that no engine has seen, so that nothing of them is cached."""
    for seed in itertools.count():
        yield random_tokens(random.Random(seed), 4096, PROMPT)


def waits(rounds: Rounds[str]) -> Scores:
    """Return the figures that have to be steady."""
    return with_spreads([{f"{name} of {key}": row[key][name] for key in row for name in row[key]} for row in rounds])


def turn(llm: Any, prompts: Iterator[list[int]], num_threads: int) -> Scores:
    """Let NUM_PROMPTS prompts arrive. Return the times between two tokens of the others, and to the first token."""
    torch.set_num_threads(num_threads)
    waits = [one_prompt(llm.llm_engine, next(prompts)) for _ in range(NUM_PROMPTS)]
    gaps, first_tokens = [gap for each, _ in waits for gap in each], [first_token for _, first_token in waits]
    twentieths = statistics.quantiles(gaps, n=20, method="inclusive")
    times = {"itl": statistics.median(gaps), "itl_p95": twentieths[-1], "ttft": statistics.median(first_tokens)}
    return {f"{name}_ms": 1000 * seconds for name, seconds in times.items()}


def one_prompt(engine: Any, prompt: list[int]) -> tuple[list[float], float]:
    """Let a prompt arrive while others decode. Return the seconds of each step, and from its arrival to its token."""
    params = partial(stage(BRANCH).SamplingParams, temperature=0.0, ignore_eos=True)
    others = [str(number) for number in range(NUM_DECODES)]
    for name in others:
        engine.add_request(name, even_prompt(SHORT), params(max_tokens=1000))
    while engine.scheduler.waiting or any(seq.num_uncomputed_tokens > 1 for seq in engine.scheduler.running):
        engine.step()
    ended = [time.perf_counter()]  # the steps, in each of which the others get a token
    arrived = is_complete = False
    while not is_complete:
        if not arrived and len(ended) > PAUSE:
            arrival, arrived = ended[-1], True
            engine.add_request("prompt", prompt, params(max_tokens=1))
        names = {output.request_id for output in engine.step()}
        ended.append(time.perf_counter())
        is_complete = "prompt" in names
        assert names >= {*others}, "a sequence has ended before the prompt was computed"
    for name in others:
        engine.abort_request(name)
    return [after - before for before, after in itertools.pairwise(ended)], ended[-1] - arrival
