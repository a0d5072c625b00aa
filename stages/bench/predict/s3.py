"""Stage 3: the cost of scattered blocks, attention's memory besides the pool, and the speed of one sequence."""

import itertools
from pathlib import Path

from nanovllm.bench.harness import Scores, ratios, take_turns
from stages.bench.counting import Operations, peak_bytes
from stages.bench.decode_step import STAGES, AttentionAlone, Case, DecodeStep
from stages.bench.models import storyteller_of
from stages.s1_contiguous_cache.llama import ModelConfig

CONTEXTS = (1024, 4096, 16384, 65536)
NUM_ROUNDS = 15


def measure(model: Path) -> Scores:
    """Return scattered steps, extra bytes and operations."""
    extra = {stage: {str(context): extra_bytes(stage, 1, context) for context in CONTEXTS} for stage in STAGES}
    return {
        "scattered": scattered_blocks(model),
        "extra_bytes": extra,
        "extra_bytes_of_32": {stage: extra_bytes(stage, batch=32, context=1024) for stage in STAGES},
        "growth": {stage: extra[stage]["65536"] / extra[stage]["16384"] for stage in ("s2", "s3")},
        "less_memory": extra["s2"]["65536"] / extra["s3"]["65536"],
        "operations": operations_of_a_step(model),
    }


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
