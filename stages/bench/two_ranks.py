"""The two_ranks table: decode steps of one rank and of two, on the cores of this machine. Of more_two_ranks.

Both engines serve the same batch, in turns. A rank alone has all cores, and two ranks share them. They share the memory
as well, so two ranks can't win here: the table shows what the all-reduces and the messages cost.
"""

from argparse import Namespace
from functools import partial
from typing import Any

import torch

from nanovllm.bench.harness import ratio, seconds_of, with_spreads
from stages.bench.engines import stage
from stages.bench.models import STORYTELLER
from stages.bench.results import machine
from stages.bench.steady import until_steady
from stages.bench.workloads import even_prompt

BRANCH = "more_two_ranks"
SIZES = {"one": 1, "two": 2}
BATCHES, CONTEXT, STEPS = (1, 8), 32, 16  # a turn has so many steps


def measure(args: Namespace) -> dict[str, Any]:
    """Measure each batch. The ranks end with the table."""
    num_threads = torch.get_num_threads()
    tokens = 2 * max(BATCHES) * CONTEXT
    options: dict[str, Any] = {"dtype": "float32", "enable_prefix_caching": False, "kv_cache_tokens": tokens}
    llms = {name: stage(BRANCH).LLM(STORYTELLER, tensor_parallel_size=size, **options) for name, size in SIZES.items()}
    threads = {name: max(1, num_threads // size) for name, size in SIZES.items()}
    try:
        steps = {}
        for batch in BATCHES:
            calls = {name: partial(decode, llms[name], batch, threads[name]) for name in SIZES}
            rounds, turns = until_steady(calls, compared, most=40, title=f"two ranks, batch of {batch}")
            times = with_spreads([{f"{name}_ms": each[name] for name in each} for each in rounds])
            steps[str(batch)] = times | compared(rounds) | {"turns": turns}
    finally:
        llms["two"].llm_engine.ranks.close()
        torch.set_num_threads(num_threads)
    return {"two_ranks": {"machine": machine(), "steps": steps}}


def compared(rounds: Any) -> dict[str, Any]:
    """Return the speed of two ranks over that of one."""
    return ratio(rounds, "one", "two").named("ratio")


def decode(llm: Any, batch: int, num_threads: int) -> float:
    """Return the milliseconds of a decode step of a batch, the mean of STEPS."""
    torch.set_num_threads(num_threads)
    engine = llm.llm_engine
    params = stage(BRANCH).SamplingParams(temperature=0.0, max_tokens=STEPS + 2, ignore_eos=True)
    for number in range(batch):
        engine.add_request(str(number), even_prompt(CONTEXT), params)
    while engine.scheduler.waiting or any(seq.num_uncomputed_tokens > 1 for seq in engine.scheduler.running):
        engine.step()
    seconds = seconds_of(lambda: [engine.step() for _ in range(STEPS)])
    for number in range(batch):
        engine.abort_request(str(number))
    return 1000 * seconds / STEPS
