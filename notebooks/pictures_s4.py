"""What stage 4's notebook draws with: who did what in each step, tokens against the budget, waits, a roofline."""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, NullLocator

from notebooks import pictures
from notebooks.live import Run, Step
from notebooks.pictures import ACCENT, INK, LIGHT, PAPER, USED

STATES = {"decode": USED, "prefill": ACCENT, "waits": LIGHT, "preempted": PAPER}


class Span(NamedTuple):
    """What a request did from `start` to `end`, on the clock."""

    state: str  # a key of STATES
    start: float
    end: float


def spans(run: Run, number: int) -> list[Span]:
    """The life of a request, from its arrival to its last token; neighbours of one state are one span."""
    arrival, furthest = run.arrivals[number], 0
    now, made = arrival.time, list[Span]()
    for step in run.steps:
        if number not in step.work:
            continue
        start, count, _ = step.work[number]
        made.append(Span("preempted" if start < furthest else "waits", now, step.start))
        state = "decode" if start >= max(furthest, len(arrival.prompt)) else "prefill"
        made.append(Span(state, step.start, step.end))
        furthest, now = max(furthest, start + count), step.end
    return joined(span for span in made if span.end > span.start)


def joined(parts: Iterable[Span]) -> list[Span]:
    """
    >>> joined([Span("waits", 0, 1), Span("decode", 1, 2), Span("decode", 2, 3)])
    [Span(state='waits', start=0, end=1), Span(state='decode', start=1, end=3)]
    """
    made: list[Span] = []
    for part in parts:
        if made and made[-1].state == part.state and made[-1].end == part.start:
            made[-1] = made[-1]._replace(end=part.end)
        else:
            made.append(part)
    return made


def gantt(ax: Axes, run: Run, title: str) -> None:
    """A row for each request, the first to arrive at the top."""
    boxes: dict[str, list] = {state: [] for state in STATES}
    for row in range(len(run.arrivals)):
        for state, start, end in spans(run, row):
            thin = 0.25 if state in ("waits", "preempted") else 0.0
            boxes[state].append(pictures.box(start, end - start, row + 0.08 + thin, 0.84 - 2 * thin))
    for state in ("waits", "preempted", "prefill", "decode"):
        pictures.polygons(ax, boxes[state], STATES[state], edge=INK if state == "preempted" else "none", width=0.7)
    ax.set(ylim=(len(run.arrivals), 0), yticks=[], ylabel="requests, by arrival", title=title)
    pictures.thousands(ax.xaxis)


def key(ax: Axes, states: Iterable[str]) -> None:
    """What the colours mean, above the upper right corner of the axes."""
    edges = {state: INK if STATES[state] == PAPER else "none" for state in states}
    handles = [
        Patch(facecolor=STATES[state], edgecolor=edge, label=state, linewidth=0.7) for state, edge in edges.items()
    ]
    look = {"frameon": False, "handlelength": 0.9, "handleheight": 0.8, "columnspacing": 1.4, "borderaxespad": 0.2}
    ax.legend(handles=handles, loc="lower right", bbox_to_anchor=(1, 1), ncols=len(handles), **look)


def tokens_of_steps(ax: Axes, run: Run, budget: int, title: str = "") -> None:
    """What each step computed: newest tokens below, parts of prompts above, and the most that it may."""
    decodes = [sum(work.num_tokens == 1 for work in step.work.values()) for step in run.steps]
    totals = [sum(work.num_tokens for work in step.work.values()) for step in run.steps]
    stairs(ax, run.steps, [0] * len(totals), decodes, USED)
    stairs(ax, run.steps, decodes, totals, ACCENT)
    ax.axhline(budget, color=INK, linewidth=0.9, linestyle="--")
    ax.set(xlim=(0, run.steps[-1].end), ylim=(0, 1.15 * budget), ylabel="tokens", title=title)
    pictures.thousands(ax.xaxis)


def stairs(ax: Axes, steps: Sequence[Step], low: Sequence[float], high: Sequence[float], color: str) -> None:
    """A filled band, level for as long as a step takes; each stretch of it above 0 is a polygon of its own."""
    boxes = []
    for level, group in itertools.groupby(zip(steps, low, high, strict=True), key=lambda part: part[1:]):
        members = [step for step, _, _ in group]
        bottom, top = level
        if top > bottom:
            boxes.append(pictures.box(members[0].start, members[-1].end - members[0].start, bottom, top - bottom))
    pictures.polygons(ax, boxes, color)


def held_over_time(ax: Axes, run: Run, title: str) -> None:
    """The share of the blocks that are held, and a mark where a sequence is preempted."""
    outline = [(0.0, 0.0)]
    for held, group in itertools.groupby(run.steps, key=lambda step: step.held):
        members = list(group)
        outline += [(members[0].start, held), (members[-1].end, held)]
    outline.append((outline[-1][0], 0.0))
    pictures.polygons(ax, [outline], LIGHT, edge=USED, width=0.8)
    moments = preempted_at(run)
    if moments:  # an empty line would count as one at the corner of the page
        ax.plot(moments, [1.1] * len(moments), "v", color=ACCENT, markersize=5, clip_on=False, markeredgewidth=0)
    ax.set(xlim=(0, run.steps[-1].end), ylim=(0, 1.0), title=title, yticks=[0, 0.5, 1])
    pictures.percent(ax.yaxis)
    pictures.thousands(ax.xaxis)


def preempted_at(run: Run) -> list[float]:
    """When a sequence lost its blocks, on the clock: one entry a preemption."""
    parts = (spans(run, number) for number in range(len(run.arrivals)))
    return sorted(span.start for life in parts for span in life if span.state == "preempted")


def longer_than(
    ax: Axes, waits: Mapping[str, Sequence[float]], label_at: Mapping[str, float], log: bool = False
) -> None:
    """For each name, the share of the waits, in seconds, that are longer than x. Its label stands at a given share."""
    looks = ((USED, "-"), (INK, "--"), (ACCENT, "-"))
    for (name, seconds), (color, style) in zip(waits.items(), looks, strict=False):
        x = 1000 * np.sort(np.array(seconds))
        y = 1 - np.arange(len(x)) / len(x)
        keep = np.unique(np.r_[np.linspace(0, len(x) - 1, 90).astype(int), np.arange(max(len(x) - 30, 0), len(x))])
        ax.plot(x[keep], y[keep], style, color=color, linewidth=1.6)
        nearest = int(np.abs(y - label_at[name]).argmin())
        pictures.label(ax, name, (x[nearest], y[nearest]), (6, 0), color)
    ax.set(xscale="log", yscale="log" if log else "linear")
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_minor_locator(NullLocator())
    pictures.thousands(ax.xaxis)
    ax.yaxis.set_major_formatter(FuncFormatter(lambda share, _: f"{100 * share:g}%"))
