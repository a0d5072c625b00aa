"""Part 4: steps of stage 3 under the roofs of this device: its multiplications and its memory, both measured here.

A step of the model has a number of operations and of bytes that it has to read. Their ratio says which roof is the
lower one; the time says how near the step comes to it. Claim 19: prefill is compute-bound, decode memory-bound.
"""

import gc

import torch

from stages.bench.decode_step import Case, DecodeStep
from stages.bench.gpu.common import SHAPES, Report, Row, Setup, timed_on, wall_seconds
from stages.bench.harness import Spread, take_turns, with_spreads
from stages.bench.models import num_parameters

MAX_ROUNDS, MIN_ROUNDS, SECONDS = 25, 5, 3


def measure(setup: Setup, report: Report) -> None:
    flops, bandwidth = roofs(setup)
    ridge = flops.ratio / bandwidth.ratio
    roof = {**flops.named("operations/s"), **bandwidth.named("bytes/s"), "ridge, operations a byte": ridge}
    report.table("The two roofs", [roof])
    batches, context = setup.size((1, 2, 4, 8, 16, 32, 64, 128, 256), (1, 4)), setup.size(512, 24)
    prompts = setup.size((16, 64, 256, 1024, 4096), (8,))
    for model in setup.size(("135M", "1B"), ("tiny",)):
        decode = [(batch, context, 1) for batch in batches]
        prefill = [(1, length, length) for length in prompts if length < SHAPES[model].max_position_embeddings]
        rows = [
            row_of(setup, model, case, flops.ratio, bandwidth.ratio)
            for case in (*decode, *prefill)
            if report.has_time((model, case))
        ]
        report.table(f"Steps of {model} (claim 19)", rows)


def roofs(setup: Setup) -> tuple[Spread, Spread]:
    """Operations a second of a large multiplication; bytes a second of a large copy, read and written."""
    width, size = setup.size(8192, 64), setup.size(2**30, 2**16)
    matrix = torch.randn(width, width, device=setup.device).to(getattr(torch, setup.dtype))
    source = torch.ones(size, dtype=torch.uint8, device=setup.device)
    target = torch.empty_like(source)
    calls = {"mm": lambda: torch.mm(matrix, matrix), "copy": lambda: target.copy_(source)}
    times = take_turns({name: timed_on(setup.device, call) for name, call in calls.items()}, 15, warm_ups=3)
    flops = Spread.of([2 * width**3 / each["mm"] for each in times])
    return flops, Spread.of([2 * size / each["copy"] for each in times])


def row_of(setup: Setup, model: str, case: tuple[int, int, int], flops: float, bandwidth: float) -> Row:
    """A step of `batch` sequences of `context` tokens, `count` of them computed in this step: 1, or all of a prompt."""
    gc.collect()  # the engine of the case before: its parts hold each other
    batch, context, count = case
    asked = Case(model, setup.dtype, batch, context)
    step = DecodeStep("s3", setup.folder(model), asked, device=str(setup.device))
    for seq in step.seqs:
        seq.num_computed_tokens = context - count
    work = [(seq, count) for seq in step.seqs]

    def run() -> None:
        step.runner.run(work)

    calls = {"ms": lambda: 1000 * wall_seconds(setup.device, run)}
    rounds = take_turns(calls, setup.size(MAX_ROUNDS, 2), least_rounds=MIN_ROUNDS, seconds=SECONDS)
    operations = operations_of(model, batch, context, count)
    num_bytes, floor = step.num_bytes, max(operations / flops, step.num_bytes / bandwidth)
    found = with_spreads(rounds)
    return {
        "step": "decode" if count == 1 else "prefill",
        "batch": batch,
        "context": context,
        **found,
        "tokens/s": batch * count / (found["ms"] / 1000),
        "operations a byte": operations / num_bytes,
        "of the roof": 1000 * floor / found["ms"],
    }


def operations_of(model: str, batch: int, context: int, count: int) -> float:
    """Two for each weight and token (the head's: for the last token of a sequence); scores, and sums of values."""
    shape = SHAPES[model]
    head = shape.vocab_size * shape.hidden_size
    linear = num_parameters(shape) - head  # the tied embedding is the head
    width = shape.num_attention_heads * shape.head_dim * shape.num_hidden_layers
    seen = count * (context - count) + count * (count + 1) / 2  # each token sees itself and what is before it
    return batch * (2 * linear * count + 2 * head + 4 * width * seen)
