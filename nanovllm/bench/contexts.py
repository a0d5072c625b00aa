"""Decode steps at long contexts, and how fast their attention reads the keys and values.

A step at a short context costs the same except for the attention, so the difference is the attention's.
"""

import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from ..engine import sequence
from ..engine.config import POOL_SIZES
from ..llm import LLM
from .engine import load_llm, serve
from .floor import read_bandwidth
from .harness import take_turns
from .workload import Task, check_lengths

SHORT, NUM_STEPS = 16, 8


def measure_contexts(engine: dict[str, Any], rounds: int, contexts: Sequence[int], batch_size: int) -> dict[str, Any]:
    """Return numbers by name. Raise ValueError if a context does not fit the model or the pool."""
    llm = load_llm(engine | needed(engine, max(contexts), batch_size))
    room = llm.llm_engine.kv_cache.num_blocks * llm.llm_engine.kv_cache.block_size
    for context in contexts:
        check_lengths([task_of(llm, context)], llm.max_model_len)
        if batch_size * (context + 1 + NUM_STEPS) > room:
            raise ValueError(f"{batch_size} contexts of {context} tokens do not fit in the pool of {room} slots")
    calls = {str(context): partial(step_seconds, llm, context, batch_size) for context in {SHORT, *contexts}}
    results = take_turns({**calls, "read": partial(read_bandwidth, llm)}, rounds, title="contexts")
    numbers: dict[str, Any] = {}
    for context in contexts:
        num_bytes = batch_size * (context + (NUM_STEPS + 1) / 2) * llm.llm_engine.kv_cache.bytes_per_token
        numbers |= numbers_of(context, num_bytes, results)
    return numbers


def needed(engine: dict[str, Any], context: int, batch_size: int) -> dict[str, Any]:
    """Return options for a pool with room for all sequences, unless its size is given, and for all in one step."""
    slots = batch_size * (context + 1 + NUM_STEPS + engine["block_size"])
    room = int(slots / (1 - engine["watermark"])) + 1  # with what admission leaves free
    pool = {} if any(engine[size] for size in POOL_SIZES) else {"kv_cache_tokens": room}
    seats = {name: max(engine[name], batch_size) for name in ("max_num_seqs", "max_num_batched_tokens")}
    return pool | seats | {"enable_prefix_caching": False}


def task_of(llm: LLM, context: int) -> Task:
    """Return a task that decodes NUM_STEPS tokens after `context` tokens."""
    return Task([1 + i % (llm.model_config.vocab_size - 1) for i in range(context)], 1 + NUM_STEPS)


def numbers_of(context: int, num_bytes: float, results: Sequence[dict[str, float]]) -> dict[str, Any]:
    """Return medians of the rounds. A share is None if a long step was ever faster than the short one.

    >>> rounds = [{"16": 0.010, "1000": 0.014, "read": 1e9}] * 3
    >>> numbers_of(1000, 2e6, rounds)["context 1,000: attention's share of the bandwidth"]
    0.5
    """
    steps = [each[str(context)] for each in results]
    attention = [each[str(context)] - each[str(SHORT)] for each in results]
    shares = [
        num_bytes / seconds / each["read"] for seconds, each in zip(attention, results, strict=True) if seconds > 0
    ]
    return {
        f"context {context:,}: step ms": 1000 * statistics.median(steps),
        f"context {context:,}: attention ms": 1000 * statistics.median(attention),
        f"context {context:,}: attention's share of the bandwidth": (
            statistics.median(shares) if len(shares) == len(results) else None
        ),
    }


def step_seconds(llm: LLM, context: int, batch_size: int) -> float:
    """Return the median decode step of a batch at this context."""
    with prompts_taken_as_computed(llm):
        run = serve(llm, [task_of(llm, context)] * batch_size, detokenize=False)
    return statistics.median(run.gaps[:NUM_STEPS])  # of the first sequence


@contextmanager
def prompts_taken_as_computed(llm: LLM) -> Iterator[None]:
    """Take the pool's contents for the keys and values of prompts.

    Computing real ones takes minutes, and does not change the cost of a later step.
    """
    llm.llm_engine.kv_cache.blocks.fill_(0.01)  # memory that was never written does not exist yet, and is quick to read
    manager = llm.llm_engine.kv_cache_manager
    allocate = manager.allocate

    def allocate_as_computed(seq: sequence.Sequence, hits: list[int | None]) -> None:
        allocate(seq, hits)
        seq.num_computed_tokens = seq.num_tokens - 1

    setattr(manager, "allocate", allocate_as_computed)  # noqa: B010  # mypy does not allow assigning a method
    try:
        yield
    finally:
        del manager.allocate
