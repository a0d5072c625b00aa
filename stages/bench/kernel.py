"""The kernel table: whole steps with attention that reads blocks in place, against tiles, in turns. Of more_kernel.

Decode steps, among them a mixed batch of one long context and many short ones; and chunks of a prompt with a long past,
which each of their tokens reads by itself.
"""

import copy
import gc
from argparse import Namespace
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from nanovllm.bench.harness import ratio, seconds_of, with_spreads
from stages.bench.decode_step import Case, DecodeStep
from stages.bench.engines import part
from stages.bench.models import storyteller_of
from stages.bench.predict.s3 import slots_read
from stages.bench.results import machine
from stages.bench.steady import until_steady

BRANCH = "more_kernel"
LONGEST = 4096
MIXED = Case("storyteller", "float32", batch=16, context=1000, is_mixed=True)


class Work(NamedTuple):
    """A step: its sequences, and how many tokens it computes of each, the last ones."""

    case: Case
    num_tokens: int = 1


def storyteller(batch: int, context: int, num_tokens: int = 1) -> Work:
    return Work(Case("storyteller", "float32", batch, context), num_tokens)


STEPS = {
    "decode_1_128": storyteller(1, 128),
    "decode_1_1000": storyteller(1, 1000),
    "decode_8_1000": storyteller(8, 1000),
    "decode_16_1000": storyteller(16, 1000),
    "decode_32_128": storyteller(32, 128),
    "decode_16_4000": storyteller(16, 4000),  # this one and the next are in stage 3's lesson
    "mixed_4000": Work(MIXED._replace(context=4000)),
    "mixed": Work(MIXED),
    "chunk_64_1000": storyteller(1, 1000, num_tokens=64),
    "chunk_512_4000": storyteller(1, 4000, num_tokens=512),
}


def measure(args: Namespace) -> dict[str, Any]:
    """Measure all steps, and count the slots that tiles copy in the mixed batch."""
    folder = storyteller_of(LONGEST)
    steps = {name: measure_step(folder, work, name) for name, work in STEPS.items()}
    return {"kernel": {"machine": machine(), "steps": steps, "slots": slots_read(MIXED)}}


def measure_step(folder: Path, work: Work, title: str) -> dict[str, Any]:
    """Return the milliseconds of a step with each backend, and how many times as fast the kernel is."""
    gc.collect()  # frees the previous case, whose parts refer to each other
    calls = {name: partial(seconds_of, call) for name, call in both(folder, work).items()}
    rounds, turns = until_steady(calls, lambda rounds: ratio(rounds, "tiles", "kernel").named("ratio"), title=title)
    times = with_spreads([{f"{name}_ms": 1000 * each[name] for name in each} for each in rounds])
    return times | ratio(rounds, "tiles", "kernel").named("ratio") | {"turns": turns}


def both(folder: Path, work: Work) -> dict[str, Callable[[], object]]:
    """Return calls that compute the same step with tiles and with the kernel, which read the same pool."""
    tiles = DecodeStep(BRANCH, folder, work.case)
    kernel = copy.copy(tiles)
    kernel.runner = tiles.new_runner(part(BRANCH, "kernel_attention").KernelAttention(tiles.kv_cache))
    return {"tiles": tiles.computing(work.num_tokens), "kernel": kernel.computing(work.num_tokens)}
