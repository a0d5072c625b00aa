"""Samples: several outputs of one prompt. All of it is counted, with the engine without a model, in seconds.

`first_tokens`: steps until every sample has its first token, for n = 1 and n = 4. `scarce`: requests of n = 4 from
pools that are too small for all of them: in stage 5, which computes the prompt of a preempted sample again; in stage 6,
which finds it; and in stage 7, which has a host pool four times as large beside it.
"""

from argparse import Namespace
from typing import Any

from stages.bench.engines import by_sample, without_model
from stages.bench.models import STORYTELLER
from stages.bench.racing import computed_twice, sampling_params, serve
from stages.bench.workloads import Request, even_prompt

N, BLOCK_SIZE = 4, 16
PROMPTS = (200, 208, 209, 600)  # the last one is computed in two steps
NUM_REQUESTS, PROMPT, OUTPUT = 12, 100, 60
PARTS = (1, 3, 6)  # a pool of one in so many parts of what all hold in the end
TIMES_ON_HOST = 4  # as large as the device's pool, in stage 7


def measure(args: Namespace) -> dict[str, Any]:
    first = {
        name: {str(length): {f"n{n}": first_token_steps(name, length, n) for n in (1, N)} for length in PROMPTS}
        for name in ("s5", "s6", "s7")
    }
    few_blocks = {name: scarce(name) for name in ("s5", "s6", "s7")}
    return {"samples": {"machine": "any: it is counted", "first_tokens": first, "scarce": few_blocks}}


def engine_without_model(name: str, pool: int) -> Any:
    options = {"block_size": BLOCK_SIZE, "max_num_seqs": N * NUM_REQUESTS, "kv_cache_tokens": pool}
    if name == "s7":
        options["kv_offloading_tokens"] = TIMES_ON_HOST * pool
    return without_model(name, by_sample, model=str(STORYTELLER), **options)


def first_token_steps(name: str, num_prompt_tokens: int, n: int) -> int:
    """Steps until each of the samples of a request that is alone has a token."""
    engine = engine_without_model(name, pool=8192)
    engine.add_request("0", even_prompt(num_prompt_tokens), sampling_params(name, Request([], 2, n)))
    has_tokens = False
    while not has_tokens:
        outputs = engine.step()
        has_tokens = bool(outputs) and all(sample.token_ids for sample in outputs[0].outputs)
    return engine.model_runner.num_steps


def scarce(name: str) -> dict[str, dict[str, int]]:
    """By the parts of the pool: steps, preemptions and tokens computed twice."""
    prompts = [[3 + number, *even_prompt(PROMPT - 1)] for number in range(NUM_REQUESTS)]  # nothing shared between them
    requests = [Request(prompt, OUTPUT, N) for prompt in prompts]
    needed = sum(request.num_tokens + N * BLOCK_SIZE for request in requests)  # a last block that is not full, each
    return {str(parts): counts(name, requests, needed // parts) for parts in PARTS}


def counts(name: str, requests: list[Request], pool: int) -> dict[str, int]:
    engine = engine_without_model(name, pool)
    serve(name, engine, requests)
    return {
        "pool_tokens": pool,
        "steps": engine.model_runner.num_steps,
        "preemptions": engine.scheduler.num_preemptions,
        "computed_twice": computed_twice(name, engine.model_runner.num_tokens, requests),
    }
