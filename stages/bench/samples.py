"""The samples table: several outputs of one prompt. All of it is counted without a model, in seconds.

`scarce`: requests of n = 4 in pools that are too small for all of them. Stage 5 computes the prompt of a preempted
sample again, stage 6 finds it in the cache, and stage 7 has a host pool as well, four times as large.
"""

from argparse import Namespace
from typing import Any

from nanovllm.bench.workload import Task
from stages.bench.engines import by_sample, without_model
from stages.bench.models import STORYTELLER
from stages.bench.racing import computed_twice, serve
from stages.bench.workloads import even_prompt

N, BLOCK_SIZE = 4, 16
NUM_REQUESTS, PROMPT, OUTPUT = 12, 100, 60
PARTS = (1, 3, 6)  # the pool holds this part of all requests' tokens: all, a third, a sixth
TIMES_ON_HOST = 4  # the host's pool, in pools of the device


def measure(args: Namespace) -> dict[str, Any]:
    """Count each stage that has samples."""
    few_blocks = {name: scarce(name) for name in ("s5", "s6", "s7")}
    return {"samples": {"machine": "any: it is counted", "scarce": few_blocks}}


def engine_without_model(name: str, pool: int) -> Any:
    """Return an engine with a pool of this many tokens."""
    options = {"block_size": BLOCK_SIZE, "max_num_seqs": N * NUM_REQUESTS, "kv_cache_tokens": pool}
    host = {"kv_offloading_tokens": TIMES_ON_HOST * pool} if name == "s7" else {}
    return without_model(name, by_sample, model=str(STORYTELLER), **options, **host)


def scarce(name: str) -> dict[str, dict[str, int]]:
    """Return steps, preemptions and tokens computed twice, by the part of the pool."""
    prompts = [[3 + number, *even_prompt(PROMPT - 1)] for number in range(NUM_REQUESTS)]  # nothing is shared
    tasks = [Task(prompt, OUTPUT, N) for prompt in prompts]
    needed = sum(task.num_tokens + N * BLOCK_SIZE for task in tasks)  # each last block may be nearly empty
    result = {}
    for parts in PARTS:
        engine = engine_without_model(name, needed // parts)
        serve(name, engine, tasks)
        twice = computed_twice(name, engine.model_runner.num_tokens, tasks)
        counts = {"steps": engine.model_runner.num_steps, "preemptions": engine.scheduler.num_preemptions}
        result[str(parts)] = {"pool_tokens": needed // parts, **counts, "computed_twice": twice}
    return result
