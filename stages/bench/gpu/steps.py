"""Parts 2 and 4: decode steps of stages 1, 2 and 3, and steps of stage 3 under the roofs of this device.

Claim 10: paged attention costs 4% of the speed of one sequence (1,198 tokens per second instead of 1,247, at batch 8)
and allows larger batches with 2 to 4 times the throughput.
Claim 19: prefill is compute-bound, decode memory-bound.
"""

import gc
from itertools import product
from typing import Any

import torch

from nanovllm.bench.floor import Reading, device_bandwidth
from nanovllm.bench.harness import medians, with_spreads
from stages.bench.decode import STAGES, measure_case
from stages.bench.decode_step import Case, DecodeStep
from stages.bench.gpu.common import SHAPES, PartReport, Row, Setup
from stages.bench.models import num_parameters


def decode_steps(setup: Setup, report: PartReport) -> None:
    """Measure a step by model, context and batch, and the memory that it needs besides the pool."""
    batches, contexts = setup.size((1, 8, 32, 64, 128), (1, 2)), setup.size((128, 1024, 4096), (24,))
    reading, rows = Reading(setup.device, setup.size(None, 2**16)), list[Row]()
    for model, context, batch in product(setup.models, contexts, batches):
        case = Case(model, setup.dtype, batch, context)
        if context < SHAPES[model].max_position_embeddings and report.has_time(case):
            rows.append(row_of(setup, case, reading))
    report.table("A decode step, milliseconds, and how many times as fast stage 3 is (claim 10)", rows)


def row_of(setup: Setup, case: Case, reading: Reading) -> Row:
    """Return the numbers of a case."""
    result = measure_case(case, setup.folder(case.model), STAGES, reading, str(setup.device), setup.size(3, 0.0))
    row: dict[str, Any] = {name: result[name] for name in ("model", "context", "batch")}
    for name in (*(f"{stage}_ms" for stage in STAGES), "s3_over_s2", "s3_over_s1"):
        row |= {key: result[key] for key in (name, f"{name}_spread") if key in result}
    row["s3 tokens/s"] = case.batch / (result["s3_ms"] / 1000)
    if setup.is_cuda:
        row |= {f"{stage} MB beside": result[f"{stage}_extra_bytes"] / 1e6 for stage in STAGES}
        torch.cuda.empty_cache()
    return row


# ---- the roofline


def roofline(setup: Setup, report: PartReport) -> None:
    """Measure the two roofs, and how near steps of 1 to 256 sequences and prompts come to the lower one.

    The ratio of a step's operations and bytes decides which roof is lower.
    """
    width, bandwidth = setup.size(8192, 64), device_bandwidth(setup.device)
    matrix = torch.randn(width, width, device=setup.device).to(getattr(torch, setup.dtype))
    flops = 2 * width**3 / medians(setup.turns({"mm": lambda: torch.mm(matrix, matrix)}))["mm"]
    roofs = {"operations/s": flops, "bytes/s": bandwidth, "ridge, operations per byte": flops / bandwidth}
    report.table("The two roofs", [roofs])
    prompts, context = setup.size((16, 64, 256, 1024, 4096), (8,)), setup.size(512, 24)
    for model in setup.models:
        cases = [(batch, context, 1) for batch in setup.size((1, 2, 4, 8, 16, 32, 64, 128, 256), (1, 4))]
        cases += [(1, length, length) for length in prompts if length < SHAPES[model].max_position_embeddings]
        rows = [step_row(setup, model, *case, flops, bandwidth) for case in cases if report.has_time((model, case))]
        report.table(f"Steps of {model} (claim 19)", rows)


def step_row(setup: Setup, model: str, batch: int, context: int, count: int, flops: float, bandwidth: float) -> Row:
    """Measure a step of `batch` sequences of `context` tokens, of which it computes `count`: 1, or a whole prompt."""
    gc.collect()  # frees the previous case, whose parts refer to each other
    case = Case(model, setup.dtype, batch, context)
    step = DecodeStep("s3", setup.folder(model), case, device=str(setup.device))
    result = with_spreads(setup.turns({"ms": step.computing(count)}), scale=1000)
    operations = operations_of(model, batch, context, count)
    return {
        "step": "decode" if count == 1 else "prefill",
        "batch": batch,
        "context": context,
        **result,
        "tokens/s": batch * count / (result["ms"] / 1000),
        "operations a byte": operations / step.num_bytes,
        "of the roof": 1000 * max(operations / flops, step.num_bytes / bandwidth) / result["ms"],
    }


def operations_of(model: str, batch: int, context: int, count: int) -> float:
    """Return the operations of a step: two per weight and token, plus those for attention's scores and sums of values.

    The head is computed only for the last token of each sequence.
    """
    shape = SHAPES[model]
    head = shape.vocab_size * shape.hidden_size
    linear = num_parameters(shape) - head  # the tied embedding is the head
    width = shape.num_attention_heads * shape.head_dim * shape.num_hidden_layers
    seen = count * (context - count) + count * (count + 1) / 2  # each token attends to itself and all before it
    return float(batch * (2 * linear * count + 2 * head + 4 * width * seen))
