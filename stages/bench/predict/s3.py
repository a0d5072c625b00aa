"""Stage 3: what scattered blocks cost, what memory attention needs besides the pool, who loses alone."""

import itertools
from pathlib import Path
from typing import Any

from stages.bench.counting import Operations, peak_bytes
from stages.bench.decode_step import AttentionAlone, Case, DecodeStep
from stages.bench.harness import ratio, take_turns
from stages.bench.models import storyteller_of
from stages.bench.predict.common import Answer, with_answers
from stages.bench.results import decode_case
from stages.s1_contiguous_cache.llama import ModelConfig

CONTEXTS = (1024, 4096, 16384, 65536)
NUM_ROUNDS = 15


def answers(model: Path) -> dict[str, Any]:
    extra = extra_memory()
    numbers = {
        "scattered": scattered_blocks(model),
        "extra_bytes": extra,
        "extra_bytes_of_32": {stage: extra_bytes(stage, batch=32, context=1024) for stage in ("s1", "s2", "s3")},
        "less_memory": extra["s2"]["65536"] / extra["s3"]["65536"],
        "operations": operations_of_a_step(model),
    }
    return with_answers(numbers, [scattered_answer(numbers), memory_answer(numbers), *speed_answers(numbers)])


def scattered_answer(numbers: dict[str, Any]) -> Answer:
    scattered = numbers["scattered"]
    return Answer(
        "8 sequences of 960 tokens decode. Deal their blocks of 16 out again at random, so that neighbours do not "
        "lie side by side any more: how much longer does a step take? And with blocks of 1?",
        f"{scattered['16']:.2f} times as long, and {scattered['1']:.2f} times. What lies scattered are not numbers "
        f"but pieces of a block: {scattered['piece_bytes']:,} bytes of keys, and as many of values, in each layer.",
    )


def memory_answer(numbers: dict[str, Any]) -> Answer:
    extra, of_32 = numbers["extra_bytes"], numbers["extra_bytes_of_32"]
    s2, s3 = (" / ".join(f"{extra[stage][str(context)]:,}" for context in CONTEXTS) for stage in ("s2", "s3"))
    growth = {stage: extra[stage]["65536"] / extra[stage]["16384"] for stage in extra}
    return Answer(
        "One sequence decodes at 1,024, 4,096, 16,384 and 65,536 tokens. How many bytes does attention need beside "
        "the pool, in stage 2 and in stage 3? And for 32 sequences of 1,024?",
        f"{s2} in stage 2, {s3} in stage 3. From 16,384 to 65,536 tokens that is {growth['s2']:.1f} times as many, "
        f"and {growth['s3']:.2f} times: two tiles have their full size by then; what still grows are a mask and "
        f"a table, a few bytes a slot. 32 of 1,024 tokens need {of_32['s2']:,} and {of_32['s3']:,}: stage 2 copies "
        f"one after the other, in stage 3 all share the tiles. (Stage 1, which reads slices: {of_32['s1']:,}.)",
    )


def speed_answers(numbers: dict[str, Any]) -> list[Answer]:
    operations = numbers["operations"]
    alone, of_32 = (decode_case(batch, 128)["s3_over_s1"] for batch in (1, 32))
    return [
        Answer(
            "How many operations does torch carry out in a decode step of 1 sequence, and of 32? (128 tokens each.)",
            f"{operations['s2']['1']:,} and {operations['s2']['32']:,} in stage 2, {operations['s3']['1']:,} and "
            f"{operations['s3']['32']:,} in stage 3: all sequences go through the same ones, a tile at a time, and "
            "this is one tile.",
        ),
        Answer(
            "Is stage 3 faster than stage 1 at batch 1? At 32? (128 tokens each.)",
            f"At 1 {speed(alone)}, at 32 {speed(of_32)}. Alone it has nothing to gain: there is "
            "nobody to share its operations with, and it copies a tile where stage 1 takes a slice.",
        ),
    ]


def speed(ratio: float) -> str:
    """
    >>> speed(0.9), speed(1.004), speed(1.3)
    ('0.90 times as fast', 'the same speed (1.00)', '1.30 times as fast')
    """
    return f"the same speed ({ratio:.2f})" if abs(ratio - 1) < 0.015 else f"{ratio:.2f} times as fast"


def scattered_blocks(model: Path) -> dict[str, Any]:
    """Seconds of a decode step with blocks in random order over seconds with blocks in a row, by block size."""
    case, steps = Case("storyteller", "float32", batch=8, context=960), {}
    for size in (16, 1):
        steps[f"{size}, in a row"] = step = DecodeStep("s3", model, case, block_size=size)
        steps[f"{size}, scattered"] = step.scattered()
    rounds = take_turns(steps, NUM_ROUNDS)
    config = ModelConfig.from_folder(model)
    piece_bytes = 16 * config.num_key_value_heads * config.head_dim * 4
    found: dict[str, Any] = {"piece_bytes": piece_bytes}
    for size in (16, 1):
        found |= ratio(rounds, f"{size}, scattered", f"{size}, in a row").named(str(size))
    return found


def extra_memory() -> dict[str, dict[str, int]]:
    """extra_bytes() while one sequence decodes, by stage and context."""
    return {
        stage: {str(context): extra_bytes(stage, 1, context) for context in CONTEXTS} for stage in ("s1", "s2", "s3")
    }


def extra_bytes(stage: str, batch: int, context: int) -> int:
    """The most bytes that attention holds beside the pool while a batch decodes."""
    step = DecodeStep(stage, storyteller_of(context + 2), Case("storyteller", "float32", batch, context))
    return peak_bytes(AttentionAlone(step))


def operations_of_a_step(model: Path) -> dict[str, dict[str, int]]:
    """How many operations torch carries out in a decode step, by stage and batch."""
    counts: dict[str, dict[str, int]] = {"s1": {}, "s2": {}, "s3": {}}
    for stage, batch in itertools.product(counts, (1, 32)):
        step = DecodeStep(stage, model, Case("storyteller", "float32", batch, 128))
        with Operations() as done:
            step()
        counts[stage][str(batch)] = done.count
    return counts
