"""One piece a sequence: how much of it is in use (claim 1), first fit under random sizes (2), seats (20)."""

import itertools
import random
import statistics
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from matplotlib.figure import Figure

from notebooks.helpers import pictures, s1, size
from notebooks.helpers.claims.table import BLOG, LAYOUT, SLABS, SOLVES, Finding
from stages.bench import replay, timeline, workloads
from stages.bench.engines import silent, without_model
from stages.bench.models import STORYTELLER
from stages.s1_contiguous_cache import SamplingParams
from stages.s1_contiguous_cache.input_processor import InputProcessor
from stages.s1_contiguous_cache.llama import ModelConfig
from stages.s1_contiguous_cache.slot_manager import SlotManager

POOL, LONGEST = 8192, 1024
CONFIG = ModelConfig.from_folder(STORYTELLER)


# ---- how much is in use


def shares_by_spread(count: int = 200_000, longest: int = 2048, mean: int = 256) -> dict[str, tuple[float, float]]:
    """For four kinds of lengths with one mean: the share in use of what is reserved, at a request's end and at a random
    moment.

    A quarter of a sequence is its prompt, there at once; the rest comes a token a step. So a sequence is there for 3/4
    of its length in steps, and 5/8 full on average: one meets a long one more often, by as much as it is longer.
    """
    rng = np.random.default_rng(0)
    kinds = {
        "all alike": np.ones(count),
        "uniform": rng.uniform(0, 2, count),
        "exponential": rng.exponential(1, count),
        "log-normal": rng.lognormal(0, 1.2, count),
    }
    found = {}
    for kind, lengths in kinds.items():
        for _ in range(20):  # scale to the mean, with no length above the longest
            lengths = np.clip(lengths * mean / lengths.mean(), 1, longest)
        at_any_moment = (5 / 8 * lengths * lengths).sum() / (lengths * longest).sum()
        found[kind] = float(lengths.mean() / longest), float(at_any_moment)
    return found


def shares_by_policy(num_steps: int) -> dict[str, float]:
    """The share of the pool in use when somebody is always waiting, under three ways to reserve."""
    inputs = InputProcessor(CONFIG, None, LONGEST, seed=0)
    policies = {
        "1,024 each": ("max_model_len", lambda request: request.max_tokens),
        "prompt + max_tokens": ("request", lambda request: request.max_tokens),
        "an oracle": ("request", lambda request: request.num_output_tokens),
    }
    found = {}
    for name, (reservation, max_tokens) in policies.items():
        arrivals = []
        for i, request in enumerate(workloads.traffic(num_steps, seed=1)):
            asked = SamplingParams(max_tokens=max_tokens(request))
            seq = inputs.process(str(i), [1] * request.num_prompt_tokens, asked)
            arrivals.append((seq, request.num_output_tokens))
        manager = SlotManager(POOL, reservation, LONGEST, silent("s1"))
        moments = replay.replay(manager, arrivals, num_steps, SlotManager.can_allocate)
        found[name] = statistics.mean(moment.report.used / POOL for moment in moments[num_steps // 5 :])
    return found


def finding_1(by_spread: dict[str, tuple[float, float]], by_policy: dict[str, float]) -> Finding:
    ends, moments = ([pair[i] for pair in by_spread.values()] for i in (0, 1))
    within = sum(0.20 <= share <= 0.38 for share in by_policy.values())
    return Finding(
        1,
        "contiguous reservation uses 20-38% of KV memory; under 60%; with at most 2,048 tokens and 256 on average "
        "87.5% "
        "is wasted",
        (BLOG, SOLVES, LAYOUT),
        "arithmetic for four spreads of lengths with that mean; three policies replayed, somebody always waiting",
        f"{1 - max(ends):.1%} empty at a request's end, {pictures.span(1 - x for x in moments)} at a random moment; "
        f"replayed, in use: {', '.join(f'{share:.0%} ({name})' for name, share in by_policy.items())}",
        f"87.5% holds at a request's end; {within} of {len(by_policy)} policies are within 20-38%, and "
        f"{sum(share < 0.6 for share in by_policy.values())} are under 60%: the load and the policy decide",
    )


# ---- first fit


class Churned(NamedTuple):
    full: float  # share of the pool that is held
    scattered: float  # 1 - largest free piece / all free
    report: Any


SIZES = {  # "random sizes" may mean several things; `spread` is uniform in 0 .. 1
    "uniform": lambda spread: 1 + int(255 * spread),
    "log-uniform": lambda spread: int(2 ** (8 * spread)),
    "powers of two": lambda spread: 2 ** int(8 * spread),
}
FREES = [0.4] * 5000 + [0.65] * 2400  # share of frees: the text's run; then the pool drains


def first_fit(law: str, seed: int) -> tuple[dict[int, Churned], int]:
    """80 GB in slots of a megabyte. The pool after 1,000 and after 5,000 operations, and when it has drained until it
    is as full as after 1,000; and how many requests are refused from then on.
    """
    manager, inputs, rng = (
        SlotManager(80 * 1024, "request", LONGEST, silent("s1")),
        InputProcessor(CONFIG, None, LONGEST, 0),
        random.Random(seed),
    )
    draws: Iterator[int] = (SIZES[law](rng.random()) for _ in itertools.count())
    asks = (inputs.process(str(i), [1], SamplingParams(max_tokens=max(n, 1))) for i, n in enumerate(draws))
    moments, refused = dict[int, Churned](), 0
    for operation, fits in enumerate(s1.churn(manager, asks, FREES, seed), start=1):
        has_drained = 0 in moments
        refused += has_drained and not fits
        is_drained = not has_drained and operation > 5000 and manager.report().held <= moments[1000].full * 81920
        if operation in (1000, 5000) or is_drained:
            report = manager.report()
            moments[0 if is_drained else operation] = Churned(
                report.held / report.num_slots, s1.external_fragmentation(report), report
            )
    return moments, refused


def all_runs(seeds: int) -> dict[tuple[str, int], tuple[dict[int, Churned], int]]:
    return {(law, seed): first_fit(law, seed) for law in SIZES for seed in range(seeds)}


def draw_first_fit(moments: dict[int, Churned]) -> Figure:
    """The same pool at three moments: as full at the first and the last, and the measure says something else."""
    names = {1000: "after 1,000 operations", 5000: "after 5,000", 0: "drained again"}
    finding = (
        f"{moments[1000].full:.0%} full: the measure says {moments[1000].scattered:.0%}. "
        f"{moments[0].full:.0%} full again: {moments[0].scattered:.0%}"
    )
    fig, axes = pictures.figure(finding, height=2.9, rows=3)
    for ax, (moment, name) in zip(axes, names.items(), strict=True):
        at = moments[moment]
        s1.strip(ax, at.report)
        ax.set(title=f"{name}: {at.full:.0%} held, measure {at.scattered:.0%}", xticks=[])
        pictures.bare(ax)
    return fig


def finding_2(runs: dict[tuple[str, int], tuple[dict[int, Churned], int]]) -> Finding:
    at = {n: [moments[n].scattered for moments, _ in runs.values()] for n in (1000, 5000)}
    full = {n: [moments[n].full for moments, _ in runs.values()] for n in (1000, 5000)}
    near = sum(
        abs(moments[1000].scattered - 0.34) < 0.05 and abs(moments[5000].scattered - 0.41) < 0.05
        for moments, _ in runs.values()
    )
    return Finding(
        2,
        "first fit under random sizes: 34% external fragmentation after 1,000 operations, 41% after 5,000",
        (SLABS,),
        f"80 GB, up to 256 MB each, 40% frees, stage 1's SlotManager; three laws of sizes, {len(runs)} runs",
        f"{pictures.span(at[1000])} and {pictures.span(at[5000])}; the pool is {pictures.span(full[1000])} and "
        f"{pictures.span(full[5000])} full",
        f"reproduced in {near} of {len(runs)} runs. The measure tells how full the pool was, not whether a request "
        "fits: "
        "count refusals",
    )


# ---- seats


def seats(num_steps: int) -> tuple[tuple[float, float], tuple[float, float]]:
    """(share of the pool in use, sequences at once), in pieces of 1,024 and in stage 4, somebody always waiting."""
    crowd = workloads.traffic(num_steps, seed=1)
    arrivals = replay.arrivals("s1", CONFIG, crowd, LONGEST)
    manager = SlotManager(POOL, "max_model_len", LONGEST, silent("s1"))
    moments = replay.replay(manager, arrivals, num_steps, SlotManager.can_allocate)[num_steps // 5 :]
    pieces = (
        statistics.mean(m.report.used / POOL for m in moments),
        statistics.mean(len(m.report.pieces) for m in moments),
    )
    engine = without_model("s4", model=str(STORYTELLER), dtype="float32", kv_cache_tokens=POOL, max_num_seqs=512)
    asked = [timeline.Arrival(0.0, [3] * r.num_prompt_tokens, r.num_output_tokens) for r in crowd[: num_steps // 4]]
    run = timeline.continuous(engine, asked)
    last = max(step.start for step in run.steps if any(work.start == 0 for work in step.work.values()))
    steady = [step for step in run.steps if last / 4 <= step.start <= last]  # somebody is waiting
    in_use = [sum(work.start + work.num_tokens for work in step.work.values()) / POOL for step in steady]
    return pieces, (statistics.mean(in_use), statistics.mean(len(step.work) for step in steady))


def finding_20(pieces: tuple[float, float], blocks: tuple[float, float]) -> Finding:
    fold = blocks[1] / pieces[1]
    return Finding(
        20,
        "utilisation from 30% to 96% gives about 3 times the requests in flight",
        (BLOG,),
        "counted while somebody waits: stage 1's pool in pieces of 1,024, stage 4's scheduler in blocks, the same "
        "requests",
        f"{pieces[0]:.0%} to {blocks[0]:.0%} in use, {pieces[1]:.1f} to {blocks[1]:.1f} at once: {fold:.1f} times",
        f"holds: the seats follow the use, {blocks[0] / pieces[0]:.1f} times here"
        if fold > 2.5
        else "does not hold here",
    )


def sizes_of_runs() -> int:
    """Seeds of first_fit()."""
    return size(2, 1)
