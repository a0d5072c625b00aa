"""Helpers of stage 4's notebook: arrivals and policies, the life of each request, and the tokens of each step."""

import itertools
import random
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from notebooks.helpers import pictures, size
from notebooks.helpers.pictures import ACCENT, INK, LIGHT, PAPER, USED
from stages.bench.engines import without_model
from stages.bench.timeline import Arrival, Step, Stuck, Timeline, continuous
from stages.bench.workloads import Traffic, traffic
from stages.s4_continuous_batching.block_manager import BlockManager
from stages.s4_continuous_batching.kv_cache import PoolReport
from stages.s4_continuous_batching.scheduler import Scheduler


def poisson(asked: Iterable[Traffic], mean_gap: float, seed: int = 0, vocab_size: int = 4096) -> list[Arrival]:
    """Return requests of random tokens that arrive independently, `mean_gap` apart on average. With 0, all at once."""
    rng, now, made = random.Random(seed), 0.0, []
    for request in asked:
        prompt = [rng.randrange(3, vocab_size) for _ in range(request.num_prompt_tokens)]
        made.append(Arrival(now, prompt, request.num_output_tokens))
        now += rng.expovariate(1 / mean_gap) if mean_gap else 0
    return made


def percentiles(values: Sequence[float], at: Sequence[float] = (50, 95, 99)) -> list[float]:
    """Return percentiles of the values.

    >>> percentiles([1, 2, 3, 4, 5], at=(0, 50, 100))
    [1.0, 3.0, 5.0]
    """
    return [float(value) for value in np.percentile(values, at)]


def ttft(run: Timeline) -> list[float]:
    """Return the time to first token of each request."""
    return [times[0] - arrival.time for arrival, times in zip(run.arrivals, run.token_times(), strict=True)]


def itl(run: Timeline) -> list[float]:
    """Return inter-token latencies: from each token of a request to its next one."""
    return [after - before for times in run.token_times() for before, after in itertools.pairwise(times)]


def times_preempted(run: Timeline) -> list[int]:
    """Return how many times each request was preempted and started over."""
    begun = Counter(i for step in run.steps for i, work in step.work.items() if work.start == 0)
    return [begun[i] - 1 for i in range(len(run.arrivals))]


def scheduled_by(
    policy: type[Scheduler] = Scheduler, manager: type[BlockManager] = BlockManager, **options: Any
) -> Any:
    """Return stage 4's engine without a model, with another scheduler or another block manager."""
    engine = without_model("s4", **options)
    num_blocks, block_size = engine.kv_cache_manager.num_blocks, engine.kv_cache_manager.block_size
    engine.kv_cache_manager = manager(num_blocks, block_size, engine.observer)
    engine.scheduler = policy(engine.config, engine.kv_cache_manager, engine.observer)
    return engine


class WithoutPeak(BlockManager):
    """Stage 4's manager without its peak: free() looks at all blocks for it, which takes most of the time."""

    @property
    def peak(self) -> PoolReport:
        return PoolReport(num_slots=self.num_blocks * self.block_size, promised=0, pieces=())


class Toll(NamedTuple):
    """The cost of a policy: means over some runs."""

    preemptions: float
    repeated: float  # preemptions of a request that had been preempted before
    computed_twice: float  # share of the tokens that went through the model
    steps: float
    tokens_computed: float
    for_100: float  # preemptions per 100 requests


def overloaded(
    model: str,
    blocks: int,
    seed: int,
    policy: type[Scheduler] = Scheduler,
    manager: type[BlockManager] = WithoutPeak,
    watermark: float = 0.01,
) -> Timeline:
    """Serve enough requests, all at once, to keep a pool of `blocks` blocks of 16 full for a while. Raise Stuck.

    Seats and tokens per step grow with the pool, so memory is the only limit.
    """
    num_requests = min(max(16, blocks // 5), size(1200, 100))
    bounds = {"kv_cache_tokens": 16 * blocks, "max_num_seqs": blocks, "max_num_batched_tokens": max(blocks, 64)}
    engine = scheduled_by(policy, manager, model=model, watermark=watermark, **bounds)
    return continuous(engine, poisson(traffic(num_requests, seed), mean_gap=0, seed=seed))


def gets_stuck(serve: Callable[[], Timeline]) -> bool:
    """Return True if no request can go on at some step of serve()."""
    try:
        serve()
    except Stuck:
        return True
    return False


def mean_toll(runs: Iterable[Timeline]) -> Toll:
    """Return the mean cost of some runs."""
    rows = [
        Toll(
            run.num_preemptions,
            sum(times - 1 for times in times_preempted(run) if times > 1),
            run.recomputed.total / run.tokens_computed,
            len(run.steps),
            run.tokens_computed,
            100 * run.num_preemptions / len(run.arrivals),
        )
        for run in runs
    ]
    return Toll(*(statistics.mean(column) for column in zip(*rows, strict=True)))


# ---- pictures


STATES = {"decode": USED, "prefill": ACCENT, "waiting": LIGHT, "preempted": PAPER}


class Span(NamedTuple):
    """One activity of a request, from `start` to `end` on the clock."""

    state: str  # a key of STATES
    start: float
    end: float


def spans(run: Timeline, number: int) -> list[Span]:
    """Return the life of a request from its arrival to its last token, with one span for each change of state."""
    arrival, furthest = run.arrivals[number], 0
    now, made = arrival.time, list[Span]()
    for step in run.steps:
        if number not in step.work:
            continue
        start, count, _ = step.work[number]
        made.append(Span("preempted" if start < furthest else "waiting", now, step.start))
        state = "decode" if start >= max(furthest, len(arrival.prompt)) else "prefill"
        made.append(Span(state, step.start, step.end))
        furthest, now = max(furthest, start + count), step.end
    return joined(span for span in made if span.end > span.start)


def joined(parts: Iterable[Span]) -> list[Span]:
    """Join spans of the same state. Each span starts where the one before ends.

    >>> joined([Span("waiting", 0, 1), Span("decode", 1, 2), Span("decode", 2, 3)])
    [Span(state='waiting', start=0, end=1), Span(state='decode', start=1, end=3)]
    """
    groups = [list(group) for _, group in itertools.groupby(parts, key=lambda part: part.state)]
    return [group[0]._replace(end=group[-1].end) for group in groups]


def gantt(ax: Axes, run: Timeline, title: str, only: Sequence[int] | None = None) -> None:
    """Draw a row for each request, or each of `only`, in order of arrival from the top."""
    boxes: dict[str, list] = {state: [] for state in STATES}
    shown = range(len(run.arrivals)) if only is None else only
    for row, number in enumerate(shown):
        for state, start, end in spans(run, number):
            thin = 0.25 if state in ("waiting", "preempted") else 0.0
            boxes[state].append(pictures.box(start, end - start, row + 0.08 + thin, 0.84 - 2 * thin))
    for state in ("waiting", "preempted", "prefill", "decode"):
        pictures.polygons(ax, boxes[state], STATES[state], edge=INK if state == "preempted" else "none", width=0.7)
    ax.set(ylim=(len(shown), 0), yticks=[], ylabel="requests, by arrival", title=title)
    pictures.thousands(ax.xaxis)


def tokens_of_steps(ax: Axes, run: Timeline, budget: int, title: str = "") -> None:
    """Draw the tokens of each step, decodes below and parts of prompts above, with the budget as a line."""
    decodes = [sum(work.num_tokens == 1 for work in step.work.values()) for step in run.steps]
    totals = [sum(work.num_tokens for work in step.work.values()) for step in run.steps]
    stairs(ax, run.steps, [0] * len(totals), decodes, USED)
    stairs(ax, run.steps, decodes, totals, ACCENT)
    ax.axhline(budget, color=INK, linewidth=0.9, linestyle="--")
    ax.set(xlim=(0, run.steps[-1].end), ylim=(0, 1.15 * budget), ylabel="tokens", title=title)
    pictures.thousands(ax.xaxis)


def stairs(ax: Axes, steps: Sequence[Step], low: Sequence[float], high: Sequence[float], color: str) -> None:
    """Fill a band from `low` to `high` that is level for the length of each step."""
    boxes = []
    for level, group in itertools.groupby(zip(steps, low, high, strict=True), key=lambda part: part[1:]):
        members = [step for step, _, _ in group]
        bottom, top = level
        if top > bottom:
            boxes.append(pictures.box(members[0].start, members[-1].end - members[0].start, bottom, top - bottom))
    pictures.polygons(ax, boxes, color)


def held_over_time(ax: Axes, run: Timeline, title: str) -> None:
    """Draw the share of blocks that are held, with a triangle where a sequence is preempted."""
    outline = [(0.0, 0.0)]
    for held, group in itertools.groupby(run.steps, key=lambda step: step.held):
        members = list(group)
        outline += [(members[0].start, held), (members[-1].end, held)]
    outline.append((outline[-1][0], 0.0))
    pictures.polygons(ax, [outline], LIGHT, edge=USED, width=0.8)
    moments = preempted_at(run)
    if moments:  # matplotlib draws a marker for an empty line
        ax.plot(moments, [1.1] * len(moments), "v", color=ACCENT, markersize=5, clip_on=False, markeredgewidth=0)
    ax.set(xlim=(0, run.steps[-1].end), ylim=(0, 1.0), yticks=[0, 0.5, 1])
    ax.set_title(title, pad=14 if moments else 6)
    pictures.percent(ax.yaxis)
    pictures.thousands(ax.xaxis)


def preempted_at(run: Timeline) -> list[float]:
    """Return the times at which a sequence lost its blocks, one per preemption."""
    parts = (spans(run, number) for number in range(len(run.arrivals)))
    return sorted(span.start for life in parts for span in life if span.state == "preempted")


def longer_than(ax: Axes, waits: Mapping[str, Sequence[float]], log: bool = False) -> None:
    """Draw for each name the share of its waits, in seconds, that are longer than x."""
    looks = ((USED, "-"), (INK, "--"), (ACCENT, "-"))
    for (name, seconds), (color, style) in zip(waits.items(), looks, strict=False):
        x = 1000 * np.sort(np.array(seconds))
        y = 1 - np.arange(len(x)) / len(x)
        keep = np.unique(np.r_[np.linspace(0, len(x) - 1, 90).astype(int), np.arange(max(len(x) - 30, 0), len(x))])
        ax.plot(x[keep], y[keep], style, color=color, linewidth=1.6, label=name)
    ax.set(xscale="log", yscale="log" if log else "linear")
    ax.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_minor_locator(NullLocator())
    pictures.thousands(ax.xaxis)
    ax.yaxis.set_major_formatter(FuncFormatter(lambda share, _: f"{100 * share:g}%"))
