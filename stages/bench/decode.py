"""The decode table: one step of stages 1 to 3 against each other, by batch, context, model and dtype.

Stages take turns, and one large tensor is read in between, which gives the memory's bandwidth. A mixed batch has one
long context and many short ones: stage 3 pads all of them to the longest, a tile at a time.
"""

import gc
import itertools
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from nanovllm.bench.floor import Reading
from nanovllm.bench.harness import figures, ratio, take_turns, with_spreads
from stages.bench.decode_step import SHORTEST, Case, DecodeStep
from stages.bench.models import model_135m, storyteller_of

LONGEST = 4096
MAX_ROUNDS, MIN_ROUNDS, SECONDS = 25, 5, 1.5  # of a case
TOLERANCE = 0.05  # a ratio that is nearer to 1 is neither a gain nor a loss
STAGES = ("s1", "s2", "s3")

BATCHES, SHORT = (1, 2, 4, 8, 16, 32), SHORTEST
CONTEXTS, MANY = (128, 512, 1000, 2000, 4000), 16
SHAPES = [*((batch, SHORT) for batch in BATCHES), (1, 1000), (8, 512), *((MANY, context) for context in CONTEXTS)]
CASES = [
    *(Case("storyteller", dtype, *shape) for dtype in ("float32", "bfloat16") for shape in dict.fromkeys(SHAPES)),
    *(Case("storyteller", "float32", MANY, context, is_mixed=True) for context in (512, 1000, 2000, 4000)),
    *(Case("135M", "bfloat16", batch, context) for context in (128, 512) for batch in (1, 8, 32)),
]
Results = Mapping[str, Mapping[str, Any]]  # of each case, by its key


def measure(args: Namespace) -> dict[str, Any]:
    """Measure all cases, and summarize them. About two minutes."""
    folders, reading = {"storyteller": storyteller_of(LONGEST), "135M": model_135m()}, Reading()
    cases: dict[str, Any] = {}
    for case in tqdm(CASES, "decode steps"):
        cases[case.key] = measure_case(case, folders[case.model], STAGES, reading)
    return {"decode": {"cases": cases, **summarize(cases)}}


def measure_case(
    case: Case, folder: Path, names: Sequence[str], reading: Reading, device: str = "cpu", seconds: float = SECONDS
) -> dict[str, Any]:
    """Return each stage's milliseconds per step, its share of the memory's bandwidth, and the ratio of each pair.

    The share counts every weight, key and value once. `moved_bytes` is for keys and values that are read, copied, and
    read again in the copy. A ratio says how many times as fast the later stage is.
    """
    steps = {name: DecodeStep(name, folder, case, device=device) for name in names}
    calls: dict[str, Callable[[], float]] = {**steps, "read": reading}
    rounds = take_turns(calls, MAX_ROUNDS, warm_ups=2, least_rounds=MIN_ROUNDS, seconds=seconds)
    first = steps[names[0]]
    bandwidths = [reading.num_bytes / each["read"] for each in rounds]
    result = {**case._asdict(), "bytes": first.num_bytes, "moved_bytes": first.num_bytes + 2 * first.num_kv_bytes}
    if case.is_mixed:
        result["padding"] = case.padding
    result |= with_spreads([{f"{name}_ms": 1000 * each[name] for name in calls} for each in rounds])
    shares = {
        f"{name}_of_bandwidth": [
            first.num_bytes / each[name] / rate for each, rate in zip(rounds, bandwidths, strict=True)
        ]
        for name in calls
    }
    result |= figures({"bandwidth": bandwidths, **shares})
    for a, b in itertools.combinations(names, 2):
        result |= ratio(rounds, a, b).named(f"{b}_over_{a}")
    if device.startswith("cuda"):
        result |= {f"{name}_extra_bytes": extra_bytes(step, device) for name, step in steps.items()}
    del steps, calls, first
    gc.collect()
    return result


def extra_bytes(step: DecodeStep, device: str) -> int:
    """Return the most memory that a step uses besides weights and pool, on a CUDA device."""
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    step()
    return torch.cuda.max_memory_allocated(device) - before


# ---- in words


def summarize(results: Results) -> dict[str, Any]:
    """Return where the gain over stage 2 ends, and how one sequence alone compares with stage 1."""
    gain = {}
    for dtype in ("float32", "bfloat16"):
        by_batch = {batch: over_s2(results, dtype, batch, SHORT) for batch in BATCHES}
        by_context = {context: over_s2(results, dtype, MANY, context) for context in CONTEXTS}
        many = f"in a batch of {MANY} {where_it_ends(by_context)}"
        gain[dtype] = f"at {SHORT} tokens each it is {where_it_begins(by_batch)}; {many}"
    alone = {
        "storyteller": Case("storyteller", "float32", 1, SHORT),
        "storyteller_bfloat16": Case("storyteller", "bfloat16", 1, SHORT),
        "storyteller_1000": Case("storyteller", "float32", 1, 1000),
        "135M": Case("135M", "bfloat16", 1, SHORT),
    }
    ratios: dict[str, Any] = {}
    for name, case in alone.items():
        ratios |= {name: results[case.key]["s3_over_s1"], f"{name}_spread": results[case.key]["s3_over_s1_spread"]}
    return {"gain": gain, "alone": ratios}


def over_s2(results: Results, dtype: str, batch: int, context: int) -> float:
    """Return how many times as fast stage 3 is as stage 2."""
    return float(results[Case("storyteller", dtype, batch, context).key]["s3_over_s2"])


def where_it_begins(ratios: Mapping[int, float]) -> str:
    """Say from which batch on there is a gain.

    >>> where_it_begins({1: 0.9, 8: 1.04, 16: 1.3, 32: 1.6})
    'faster in batches of 16 and more, 1.60 times as fast in one of 32'
    >>> where_it_begins({1: 0.9, 8: 1.3, 16: 1.0})
    'not faster in a batch of 16 (1.00 times)'
    """
    behind = [batch for batch, each in ratios.items() if each < 1 + TOLERANCE]
    largest = max(ratios)
    if largest in behind:
        return f"not faster in a batch of {largest} ({ratios[largest]:.2f} times)"
    first = min(batch for batch in ratios if batch > max(behind, default=0))
    return f"faster in batches of {first} and more, {ratios[largest]:.2f} times as fast in one of {largest}"


def where_it_ends(ratios: Mapping[int, float]) -> str:
    """Say up to which context there is a gain.

    >>> where_it_ends({128: 1.6, 512: 1.2, 1000: 1.01, 2000: 0.9})
    'the gain ends between 512 and 1,000 tokens (0.90 times as fast at 2,000)'
    >>> where_it_ends({128: 1.6, 512: 1.2})
    'the gain lasts to 512 tokens and beyond (1.20 times as fast at 512)'
    """
    within, longest = [context for context, each in ratios.items() if each >= 1 + TOLERANCE], max(ratios)
    if not within:
        where = "there is no gain"
    elif longest in within:
        where = f"the gain lasts to {longest:,} tokens and beyond"
    else:
        where = f"the gain ends between {max(within):,} and {min(c for c in ratios if c > max(within)):,} tokens"
    return f"{where} ({ratios[longest]:.2f} times as fast at {longest:,})"
