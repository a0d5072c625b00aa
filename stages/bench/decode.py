"""Decode: one step of stages 1 to 3 against each other, by batch, context, model and dtype.

Stages take turns, and in between a large tensor is read once, which gives the memory's bandwidth. A mixed batch has one
long context and many short ones: stage 3 pads all of them to the longest, a tile at a time.
"""

import gc
import itertools
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from stages.bench.decode_step import SHORTEST, Case, DecodeStep, Reading
from stages.bench.harness import Spread, ratio, take_turns, with_spreads
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


def measure(args: Namespace) -> dict[str, Any]:
    """All cases and what they come to. About two minutes."""
    cases = measure_cases(CASES, STAGES)
    words = summary(cases)
    for dtype, text in words["gain"].items():
        print(f"{dtype}, stage 3 against stage 2: {text}")
    return {"decode": {"cases": cases, **words}}


def measure_cases(cases: Sequence[Case], names: Sequence[str]) -> dict[str, Any]:
    """Each case by its key."""
    folders = {"storyteller": storyteller_of(LONGEST), "135M": model_135m()}
    results: dict[str, Any] = {}
    reading = Reading()
    for case in tqdm(cases, "decode steps"):
        results[case.key] = measure_case(case, folders[case.model], names, reading)
        tqdm.write(line(results[case.key], names))
    return results


def measure_case(case: Case, folder: Path, names: Sequence[str], reading: Reading) -> dict[str, Any]:
    """Of each stage milliseconds a step, and which share of the memory's bandwidth that is if every weight, key and
    value is read once; of each pair how many times as fast the later stage is. `moved_bytes`: where keys and values are
    read, written to a copy, and read again there.
    """
    steps = {name: DecodeStep(name, folder, case) for name in names}
    calls: dict[str, Callable[[], float]] = {**steps, "read": reading}
    rounds = take_turns(calls, MAX_ROUNDS, warm_ups=2, least_rounds=MIN_ROUNDS, seconds=SECONDS)
    first = steps[names[0]]
    sizes = {"bytes": first.num_bytes, "moved_bytes": first.num_bytes + 2 * first.num_kv_bytes}
    bandwidths = [reading.num_bytes / each["read"] for each in rounds]
    result = {**case._asdict(), **sizes, **Spread.of(bandwidths).named("bandwidth")}
    if case.is_mixed:
        result["padding"] = case.padding
    result |= with_spreads([{f"{name}_ms": 1000 * seconds for name, seconds in each.items()} for each in rounds])
    for name in calls:
        shares = [first.num_bytes / each[name] / rate for each, rate in zip(rounds, bandwidths, strict=True)]
        result |= Spread.of(shares).named(f"{name}_of_bandwidth")
    for a, b in itertools.combinations(names, 2):
        result |= ratio(rounds, a, b).named(f"{b}_over_{a}")
    gc.collect()
    return result


def line(result: Mapping[str, Any], names: Sequence[str]) -> str:
    """A case in a line: milliseconds, ratios, shares of the bandwidth."""
    shape = "{model:>11} {dtype:>8} batch {batch:>2} context {context:>4}".format(**result)
    mixed = f" mixed, padding {result['padding']:.0%}" if result["is_mixed"] else ""
    times = "  ".join(f"{name} {result[f'{name}_ms']:6.1f} ms" for name in names)
    ratios = "  ".join(f"{b}/{a} {result[f'{b}_over_{a}']:.2f}" for a, b in itertools.combinations(names, 2))
    shares = "  ".join(f"{name} {result[f'{name}_of_bandwidth']:4.0%}" for name in names)
    return f"{shape}{mixed}   {times}   {ratios}   of the bandwidth: {shares}"


# ---- what they come to


def summary(results: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Where the gain over stage 2 ends; one sequence alone against stage 1; a mixed batch against stage 2."""
    gain = {
        dtype: f"at {SHORT} tokens each it is {where_it_begins(by_batch(results, dtype))}; in a batch of {MANY} "
        f"{where_it_ends(by_context(results, dtype))}"
        for dtype in ("float32", "bfloat16")
    }
    alone = {
        "storyteller": Case("storyteller", "float32", 1, SHORT),
        "storyteller_bfloat16": Case("storyteller", "bfloat16", 1, SHORT),
        "storyteller_1000": Case("storyteller", "float32", 1, 1000),
        "135M": Case("135M", "bfloat16", 1, SHORT),
    }
    told: dict[str, Any] = {}
    for name, case in alone.items():
        told |= {name: results[case.key]["s3_over_s1"], f"{name}_spread": results[case.key]["s3_over_s1_spread"]}
    return {"gain": gain, "alone": told}


def by_batch(results: Mapping[str, Mapping[str, Any]], dtype: str) -> dict[int, float]:
    """How many times as fast stage 3 is as stage 2, in batches of short contexts."""
    return {batch: results[Case("storyteller", dtype, batch, SHORT).key]["s3_over_s2"] for batch in BATCHES}


def by_context(results: Mapping[str, Mapping[str, Any]], dtype: str) -> dict[int, float]:
    """The same in a large batch, by context length."""
    return {context: results[Case("storyteller", dtype, MANY, context).key]["s3_over_s2"] for context in CONTEXTS}


def where_it_begins(ratios: Mapping[int, float]) -> str:
    """
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
    """
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
