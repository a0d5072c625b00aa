"""What a decode step costs at long contexts, and how fast its attention reads the keys and values.

A step at a short context costs the same but for the attention. So what a step costs beyond that is the attention's.
"""

import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from typing import Any

from ...engine.config import POOL_SIZES
from ...engine.sequence import Sequence
from ...llm import LLM
from ..compiling import compiled_llm
from .answers import Answer, serve_here
from .floor import read_bandwidth
from .turns import take_turns
from .workload import Task, check_length

SHORT, NUM_STEPS = 16, 8


def measure_contexts(engine: dict[str, Any], rounds: int, contexts: list[int], batch_size: int) -> dict[str, Any]:
    """Numbers by their names. Raises ValueError if the model or the pool cannot take such a context."""
    llm = compiled_llm(engine | needed(engine, max(contexts), batch_size))
    for context in contexts:
        check_length(llm, context, 1 + NUM_STEPS)
        if batch_size * (context + 1 + NUM_STEPS) > llm.kv_cache.num_blocks * llm.kv_cache.block_size:
            room = llm.kv_cache.num_blocks * llm.kv_cache.block_size
            raise ValueError(f"{batch_size} contexts of {context} tokens: the pool has {room} slots")
    calls = {context: partial(step_seconds, llm, context, batch_size) for context in {SHORT, *contexts}}
    reads = {0: partial(read_bandwidth, llm)}
    found = take_turns({str(key): call for key, call in (calls | reads).items()}, rounds, "contexts")
    numbers: dict[str, Any] = {}
    for context in contexts:
        num_bytes = batch_size * (context + (NUM_STEPS + 1) / 2) * llm.kv_cache.bytes_per_token
        numbers |= figures(context, num_bytes, found)
    return numbers


def needed(engine: dict[str, Any], context: int, batch_size: int) -> dict[str, Any]:
    """A pool with room for all of them, unless its size was given; seats and a budget for all at once."""
    slots = batch_size * (context + 1 + NUM_STEPS + engine["block_size"])
    room = int(slots / (1 - engine["watermark"])) + 1  # with what admitting them leaves free
    pool = {} if any(engine[size] for size in POOL_SIZES) else {"kv_cache_tokens": room}
    seats = {name: max(engine[name], batch_size) for name in ("max_num_seqs", "max_num_batched_tokens")}
    return pool | seats | {"enable_prefix_caching": False}


def figures(context: int, num_bytes: float, found: list[dict[str, float]]) -> dict[str, Any]:
    """Medians of the rounds. A share is None where the two steps differ by less than they spread.

    >>> rounds = [{"16": 0.010, "1000": 0.014, "0": 1e9}] * 3
    >>> figures(1000, 2e6, rounds)["context 1,000: attention's share of the bandwidth"]
    0.5
    """
    steps = [each[str(context)] for each in found]
    attention = [each[str(context)] - each[str(SHORT)] for each in found]
    shares = [num_bytes / seconds / each["0"] for seconds, each in zip(attention, found, strict=True) if seconds > 0]
    is_told = len(shares) == len(found)
    return {
        f"context {context:,}: step ms": 1000 * statistics.median(steps),
        f"context {context:,}: attention ms": 1000 * statistics.median(attention),
        f"context {context:,}: attention's share of the bandwidth": statistics.median(shares) if is_told else None,
    }


def step_seconds(llm: LLM, context: int, batch_size: int) -> float:
    """The median decode step of a batch that has such contexts."""
    tasks = [Task([1 + i % (llm.model_config.vocab_size - 1) for i in range(context)], 1 + NUM_STEPS)] * batch_size
    with prompts_taken_as_computed(llm):
        answer = serve_here(llm, tasks)
    return median_step(answer)


def median_step(answer: Answer) -> float:
    """Between tokens of the first sequence.

    >>> median_step(Answer([[1, 2, 3, 4]], [[5.0, 6.0, 9.0, 11.0]]))
    2.0
    """
    times = answer.times[0]
    return statistics.median(after - before for before, after in pairwise(times))


@contextmanager
def prompts_taken_as_computed(llm: LLM) -> Iterator[None]:
    """What lies in a prompt's blocks stands for its keys and values: to compute them takes minutes, and changes nothing
    in what a later step costs.
    """
    llm.kv_cache.blocks.fill_(0.01)  # memory that was never written is not there yet, and quick to read
    manager = llm.llm_engine.kv_cache_manager
    allocate = manager.allocate

    def allocate_as_computed(seq: Sequence, hits: list[int | None]) -> None:
        allocate(seq, hits)
        seq.num_computed_tokens = seq.num_tokens - 1

    manager.allocate = allocate_as_computed  # type: ignore[method-assign]
    try:
        yield
    finally:
        del manager.allocate
