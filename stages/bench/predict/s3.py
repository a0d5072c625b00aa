"""Stage 3: what scattered blocks cost, what memory attention needs besides the pool, who loses alone."""

import itertools
from pathlib import Path
from typing import Any

from stages.bench.counting import Operations, peak_bytes
from stages.bench.decode_step import AttentionAlone, Case, DecodeStep
from stages.bench.harness import ratio, take_turns
from stages.bench.models import storyteller_of
from stages.bench.predict.common import Answer, Shown, with_answers
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
    show = Shown("predict.s3", numbers)
    entries = [scattered_answer(show), memory_answer(show, extra), operations_answer(show), speed_answer()]
    return with_answers(numbers, entries)


def scattered_answer(show: Shown) -> Answer:
    return Answer(
        "8 sequences of 960 tokens decode. Deal their blocks of 16 out again at random, so that neighbours do not "
        "lie side by side any more: how much longer does a step take? And with blocks of 1?",
        f"{show('scattered.16', '.2f')} times as long, and {show('scattered.1', '.2f')} times. What lies scattered "
        f"are not numbers but pieces of a block: {show('scattered.piece_bytes', ',')} bytes of keys, and as many of "
        "values, in each layer.",
    )


def memory_answer(show: Shown, extra: dict[str, dict[str, int]]) -> Answer:
    s2, s3 = (" / ".join(show(f"extra_bytes.{stage}.{n}", ",") for n in CONTEXTS) for stage in ("s2", "s3"))
    of_32 = {stage: show(f"extra_bytes_of_32.{stage}", ",") for stage in ("s1", "s2", "s3")}
    growth = {stage: extra[stage]["65536"] / extra[stage]["16384"] for stage in extra}
    return Answer(
        "One sequence decodes at 1,024, 4,096, 16,384 and 65,536 tokens. How many bytes does attention need beside "
        "the pool, in stage 2 and in stage 3? And for 32 sequences of 1,024?",
        f"{s2} in stage 2, {s3} in stage 3. From 16,384 to 65,536 tokens that is {growth['s2']:.1f} times as many, "
        f"and {growth['s3']:.2f} times: two tiles have their full size by then; what still grows are a mask and "
        f"a table, a few bytes a slot. 32 of 1,024 tokens need {of_32['s2']} and {of_32['s3']}: stage 2 copies "
        f"one after the other, in stage 3 all share the tiles. (Stage 1, which reads slices: {of_32['s1']}.)",
    )


def operations_answer(show: Shown) -> Answer:
    s2, s3 = ([show(f"operations.{stage}.{batch}", ",") for batch in (1, 32)] for stage in ("s2", "s3"))
    return Answer(
        "How many operations does torch carry out in a decode step of 1 sequence, and of 32? (128 tokens each.)",
        f"{s2[0]} and {s2[1]} in stage 2, {s3[0]} and {s3[1]} in stage 3: all sequences go through the same ones, a "
        "tile at a time, and this is one tile.",
    )


def speed_answer() -> Answer:
    return Answer(
        "Is stage 3 faster than stage 1 at batch 1? At 32? (128 tokens each.)",
        f"At 1 {speed(1)}, at 32 {speed(32)}. Alone it has nothing to gain: there is nobody to share its operations "
        "with, and it copies a tile where stage 1 takes a slice.",
    )


def speed(batch: int) -> str:
    """How many times as fast as stage 1, from the decode table."""
    case = decode_case(batch, 128)
    times = Shown(f"decode.cases.storyteller_float32_{batch}_128", case)("s3_over_s1", ".2f")
    is_same = abs(case["s3_over_s1"] - 1) < 0.015
    return f"the same speed ({times})" if is_same else f"{times} times as fast"


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
