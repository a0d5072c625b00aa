"""Stage 3: the cost of scattered blocks, attention's memory besides the pool, its operations and its padding."""

import itertools
from pathlib import Path

from torch import Tensor

from nanovllm.bench.harness import Scores, ratios
from stages.bench.counting import num_operations, peak_bytes
from stages.bench.decode_step import STAGES, AttentionAlone, Case, DecodeStep
from stages.bench.models import storyteller_of
from stages.bench.steady import until_steady
from stages.s1_contiguous_cache.llama import ModelConfig

CONTEXTS = (1024, 4096, 16384, 65536)


def measure(model: Path) -> Scores:
    """Return scattered steps, extra bytes, operations, and the slots of tiles that a mixed batch reads."""
    extra = {stage: {str(context): extra_bytes(stage, 1, context) for context in CONTEXTS} for stage in STAGES}
    return {
        "scattered": scattered_blocks(model),
        "extra_bytes": extra,
        "extra_bytes_of_32": {stage: extra_bytes(stage, batch=32, context=1024) for stage in STAGES},
        "growth": {stage: extra[stage]["65536"] / extra[stage]["16384"] for stage in ("s2", "s3")},
        "less_memory": extra["s2"]["65536"] / extra["s3"]["65536"],
        "operations": operations_of_a_step(model),
        "mixed": slots_read(Case("storyteller", "float32", batch=16, context=4000, is_mixed=True)),
    }


def scattered_blocks(model: Path) -> Scores:
    """Return seconds of a decode step with blocks in random order over seconds with blocks in a row, by block size."""
    config, steps = ModelConfig.from_folder(model), dict[str, DecodeStep]()
    for size in (16, 1):
        step = DecodeStep("s3", model, Case("storyteller", "float32", batch=8, context=960), block_size=size)
        steps |= {f"{size}, in a row": step, f"{size}, scattered": step.scattered()}
    pairs = {str(size): (f"{size}, scattered", f"{size}, in a row") for size in (16, 1)}
    piece_bytes = 16 * config.num_key_value_heads * config.head_dim * 4
    rounds, turns = until_steady(steps, lambda rounds: ratios(rounds, pairs))
    return {"piece_bytes": piece_bytes, **ratios(rounds, pairs), "turns": turns}


def extra_bytes(stage: str, batch: int, context: int) -> int:
    """Return the most bytes that attention holds besides the pool while a batch decodes."""
    step = DecodeStep(stage, storyteller_of(context + 2), Case("storyteller", "float32", batch, context))
    return peak_bytes(AttentionAlone(step))


def slots_read(case: Case) -> dict[str, int]:
    """Return how many tokens a decode step attends to, and how many slots its tiles have, in a layer."""
    step, sizes = DecodeStep("s3", storyteller_of(case.context + 2), case), []
    read = step.kv_cache.read

    def counted(layer: int, blocks: Tensor) -> tuple[Tensor, Tensor]:
        keys, values = read(layer, blocks)
        sizes.append(keys.shape[:2].numel() if layer == 0 else 0)  # [num_rows, num_slots, num_kv_heads, head_dim]
        return keys, values

    step.kv_cache.read = counted
    step()
    return {"tokens": sum(case.contexts), "slots": sum(sizes)}


def operations_of_a_step(model: Path) -> dict[str, dict[str, int]]:
    """Return the operations that torch carries out in a decode step, by stage and batch."""
    counts: dict[str, dict[str, int]] = {stage: {} for stage in STAGES}
    for stage, batch in itertools.product(STAGES, (1, 32)):
        step = DecodeStep(stage, model, Case("storyteller", "float32", batch, 128))
        counts[stage][str(batch)] = num_operations(step)
    return counts
