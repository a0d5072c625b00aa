"""Stage 3: the cost of scattered blocks, attention's memory besides the pool, and the speed of one sequence."""

import itertools
from pathlib import Path
from typing import Any

from nanovllm.bench.harness import Scores, ratios, take_turns
from stages.bench.counting import Operations, peak_bytes
from stages.bench.decode_step import AttentionAlone, Case, DecodeStep
from stages.bench.models import storyteller_of
from stages.bench.results import decode_case
from stages.s1_contiguous_cache.llama import ModelConfig

CONTEXTS = (1024, 4096, 16384, 65536)
NUM_ROUNDS = 15
STAGES = ("s1", "s2", "s3")


def measure(model: Path) -> Scores:
    """Return scattered steps, extra bytes and operations."""
    extra = {stage: {str(context): extra_bytes(stage, 1, context) for context in CONTEXTS} for stage in STAGES}
    return {
        "scattered": scattered_blocks(model),
        "extra_bytes": extra,
        "extra_bytes_of_32": {stage: extra_bytes(stage, batch=32, context=1024) for stage in STAGES},
        "less_memory": extra["s2"]["65536"] / extra["s3"]["65536"],
        "operations": operations_of_a_step(model),
    }


def derived(numbers: Scores) -> dict[str, Any]:
    """Return the growth of extra bytes, and the speed over stage 1 in words."""
    extra = numbers["extra_bytes"]
    growth = {f"growth_{stage}": extra[stage]["65536"] / extra[stage]["16384"] for stage in ("s2", "s3")}
    return growth | {f"speed_{batch}": speed(batch) for batch in (1, 32)}


def speed(batch: int) -> str:
    """Say how many times as fast as stage 1 a step is, from the decode table."""
    times = decode_case(batch, 128)["s3_over_s1"]
    key = f"decode.cases.storyteller_float32_{batch}_128.s3_over_s1:.2f"
    marked = f"<!-- n: {key} -->{times:.2f}<!-- / -->"
    return f"the same speed ({marked})" if abs(times - 1) < 0.015 else f"{marked} times as fast"


def scattered_blocks(model: Path) -> Scores:
    """Return seconds of a decode step with blocks in random order over seconds with blocks in a row, by block size."""
    config, steps = ModelConfig.from_folder(model), dict[str, DecodeStep]()
    for size in (16, 1):
        step = DecodeStep("s3", model, Case("storyteller", "float32", batch=8, context=960), block_size=size)
        steps |= {f"{size}, in a row": step, f"{size}, scattered": step.scattered()}
    pairs = {str(size): (f"{size}, scattered", f"{size}, in a row") for size in (16, 1)}
    piece_bytes = 16 * config.num_key_value_heads * config.head_dim * 4
    return {"piece_bytes": piece_bytes, **ratios(take_turns(steps, NUM_ROUNDS), pairs)}


def extra_bytes(stage: str, batch: int, context: int) -> int:
    """Return the most bytes that attention holds besides the pool while a batch decodes."""
    step = DecodeStep(stage, storyteller_of(context + 2), Case("storyteller", "float32", batch, context))
    return peak_bytes(AttentionAlone(step))


def operations_of_a_step(model: Path) -> dict[str, dict[str, int]]:
    """Return the operations that torch carries out in a decode step, by stage and batch."""
    counts: dict[str, dict[str, int]] = {stage: {} for stage in STAGES}
    for stage, batch in itertools.product(STAGES, (1, 32)):
        step = DecodeStep(stage, model, Case("storyteller", "float32", batch, 128))
        with Operations() as done:
            step()
        counts[stage][str(batch)] = done.count
    return counts
