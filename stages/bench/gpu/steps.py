"""Part 2: one decode step of stages 1, 2 and 3, in turns, by model, batch and context; what it holds beside the pool.

Claim 10: paged attention costs 4% of the speed of one sequence (1,198 tokens a second in place of 1,247, at batch 8)
and buys 2 to 4 times the throughput by larger batches.
"""

import gc
from typing import Any

import torch

from stages.bench.decode_step import Case, DecodeStep
from stages.bench.gpu.common import SHAPES, Report, Row, Setup
from stages.bench.harness import ratio, take_turns, with_spreads

STAGES = ("s1", "s2", "s3")
MAX_ROUNDS, MIN_ROUNDS, SECONDS = 25, 5, 4


def measure(setup: Setup, report: Report) -> None:
    models = setup.size(("135M", "1B"), ("tiny",))
    batches, contexts = setup.size((1, 8, 32, 64, 128), (1, 2)), setup.size((128, 1024, 4096), (24,))
    shapes = [(context, batch) for context in contexts for batch in batches]
    cases = [Case(model, setup.dtype, batch, context) for model in models for context, batch in shapes]
    cases = [case for case in cases if case.context < SHAPES[case.model].max_position_embeddings]
    rows = [row_of(setup, case) for case in cases if report.has_time(case)]
    report.table("A decode step, milliseconds, and how many times as fast stage 3 is", rows)
    report.table("Claim 10: against contiguous pieces, and by batch", claim_10(rows, batches))


def row_of(setup: Setup, case: Case) -> Row:
    folder = setup.folder(case.model)
    steps = {name: DecodeStep(name, folder, case, device=str(setup.device)) for name in STAGES}
    most, warm_ups = setup.size(MAX_ROUNDS, 2), setup.size(3, 1)  # a step ends on the host: no need to synchronize
    rounds = take_turns(steps, most, warm_ups=warm_ups, least_rounds=MIN_ROUNDS, seconds=SECONDS)
    found = with_spreads([{f"{name} ms": 1000 * each[name] for name in STAGES} for each in rounds])
    found |= ratio(rounds, "s2", "s3").named("s3 over s2") | ratio(rounds, "s1", "s3").named("s3 over s1")
    found["s3 tokens/s"] = case.batch / (found["s3 ms"] / 1000)
    if setup.is_cuda:
        found |= {f"{name} MB beside": extra_bytes(setup, step) / 1e6 for name, step in steps.items()}
    row = {"model": case.model, "context": case.context, "batch": case.batch, **found}
    del steps
    gc.collect()
    if setup.is_cuda:
        torch.cuda.empty_cache()
    return row


def extra_bytes(setup: Setup, step: DecodeStep) -> int:
    """The most that a step holds beside weights and pool."""
    torch.cuda.synchronize(setup.device)
    torch.cuda.reset_peak_memory_stats(setup.device)
    before = torch.cuda.memory_allocated(setup.device)
    step()
    return torch.cuda.max_memory_allocated(setup.device) - before


def claim_10(rows: list[Row], batches: tuple[int, ...]) -> list[dict[str, Any]]:
    """A row for each model and context: stage 3's speed over stage 1's alone, and its throughput by batch."""
    found = []
    for model, context in dict.fromkeys((row["model"], row["context"]) for row in rows):
        by_batch = {row["batch"]: row for row in rows if (row["model"], row["context"]) == (model, context)}
        row: dict[str, Any] = {"model": model, "context": context}
        row |= {f"s3 over s1, batch {batch}": by_batch[batch]["s3 over s1"] for batch in batches if batch in by_batch}
        for batch in (batch for batch in batches[2:] if {batch, batches[1]} <= by_batch.keys()):
            gain = by_batch[batch]["s3 tokens/s"] / by_batch[batches[1]]["s3 tokens/s"]
            row[f"tokens/s, batch {batch} over {batches[1]}"] = gain
        found.append(row)
    return found
