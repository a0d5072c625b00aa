"""What stage 1's notebook needs: what a pool was used for, and its pieces over time and at a refusal."""

import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from notebooks.helpers.pictures import (
    ACCENT,
    GREY,
    INK,
    PALE,
    PAPER,
    USED,
    bare,
    box,
    label,
    percent,
    polygons,
    thousands,
)

SHARES = {"used": USED, "reserved, empty": PALE, "holes": ACCENT, "largest free piece": PAPER}


class Pool(Protocol):
    """What a stage's report says of a pool, in slots."""

    @property
    def num_slots(self) -> int: ...
    @property
    def pieces(self) -> tuple[tuple[int, int, int], ...]:
        """(start, size, used) of each holder, by start"""


# ---- a pool in use


def churn(manager: Any, sequences: Iterator[Any], frees: Iterable[float], seed: int) -> Iterator[bool]:
    """Allocate or free at random. Each entry of `frees` is an operation: the probability that it frees one of the
    holders, any of them alike; otherwise the next of `sequences` asks for room. Yields whether that was to be had.
    """
    rng = random.Random(seed)
    holders: list[Any] = []
    for probability in frees:
        fits = True
        if holders and rng.random() < probability:
            manager.free(holders.pop(rng.randrange(len(holders))))
        else:
            seq = next(sequences)
            fits = manager.can_allocate(seq)
            if fits:
                manager.allocate(seq)
                holders.append(seq)
        yield fits


def shares(reports: list[Any]) -> dict[str, list[float]]:
    """What the pool was used for at each of `reports`, in shares that sum to 1. Holes: free, but not in the largest
    free piece.
    """
    return {
        "used": [report.used / report.num_slots for report in reports],
        "reserved, empty": [report.wasted / report.num_slots for report in reports],
        "holes": [1 - (report.held + report.largest_free) / report.num_slots for report in reports],
        "largest free piece": [report.largest_free / report.num_slots for report in reports],
    }


def external_fragmentation(report: Any) -> float:
    """1 - largest free piece / all free slots: 0 if the free slots are one piece, near 1 if they are crumbs."""
    free = report.num_slots - report.held
    return 1 - report.largest_free / free if free else 0.0


# ---- quantities


def points(ax: Axes, values: Mapping[float, float], text: str) -> None:
    """What somebody claims: a diamond at each (x, y) with `text`, formatted with y."""
    for x, y in values.items():
        ax.plot(x, y, "D", color=INK, markersize=5)
        label(ax, text.format(y), (x, y), (7, 0))


def runs(ax: Axes, x: Sequence[float], runs: Iterable[Sequence[float]], color: str, width: float = 0.9) -> None:
    """Several runs of one quantity: thin lines of one colour, without labels."""
    for run in runs:
        ax.plot(x, run, color=color, linewidth=width)


def stacked_shares(ax: Axes, shares: Mapping[str, Sequence[float]], every: int = 1, title: str = "") -> None:
    """Shares of a pool, one value a step each, stacked from the bottom; the names are those of SHARES. One step of
    `every` is drawn. A label stands where its band is on average; a band that is thinner than the type has none.
    """
    bottom = [0.0] * len(next(iter(shares.values())))
    steps = range(0, len(bottom), every)
    for text, share in shares.items():
        top, color = [b + s for b, s in zip(bottom, share, strict=True)], SHARES[text]
        ax.fill_between(steps, bottom[::every], top[::every], color=color, linewidth=0)
        mean = sum(share) / len(share)
        if mean > 0.05:
            middle = sum(bottom) / len(bottom) + mean / 2
            paper = None if color in (USED, PALE) else {"facecolor": PAPER, "edgecolor": "none", "pad": 1, "alpha": 0.8}
            ink = PAPER if color == USED else INK
            ax.text(steps[-1] / 2, middle, f"{text} {mean:.0%}", ha="center", va="center", color=ink, bbox=paper)
        bottom = top
    ax.set(xlim=(0, steps[-1]), ylim=(0, 1), yticks=[], title=title, xlabel="step")
    thousands(ax.xaxis)
    ax.spines[:].set_visible(True)


def dots(ax: Axes, values: Mapping[str, float], others: Mapping[str, float], names: tuple[str, str]) -> None:
    """A row for each of `values`: a full dot, labelled, and a hollow one where `others` has the row too. `names` says
    what the two stand for, at the first row that has both.
    """
    rows = {text: -i for i, text in enumerate(values)}
    heights = list(rows.values())
    ax.hlines(heights, 0, list(values.values()), color=PALE, linewidth=1)
    ax.plot(list(values.values()), heights, "o", color=USED, markersize=6)
    hollow = [rows[text] for text in others]
    ax.plot(list(others.values()), hollow, "o", color=INK, markerfacecolor=PAPER, markersize=6)
    for text, value in values.items():
        label(ax, f"{value:.0%}", (value, rows[text]), (0, 5), USED)
    first = next(iter(others))
    label(ax, names[0], (values[first], rows[first]), (0, 16), USED, ha="right")
    label(ax, names[1], (others[first], rows[first]), (0, 16), INK, ha="left")
    ax.set(yticks=heights, yticklabels=list(rows), ylim=(-len(rows) + 0.4, 1.2))
    percent(ax.xaxis)
    ax.spines["left"].set_visible(False)
    ax.tick_params(axis="y", length=0)


def band(ax: Axes, low: float, high: float, text: str) -> None:
    """A range that somebody claims, behind everything else."""
    ax.axvspan(low, high, color=ACCENT, alpha=0.16, linewidth=0)
    label(ax, text, ((low + high) / 2, ax.get_ylim()[0]), (0, 4), ACCENT)


# ---- pools


def pool_over_time(ax: Axes, reports: Mapping[int, Pool], title: str = "") -> None:
    """Every slot of the pool, bottom to top, against the step: each holder is a pale bar, and what it uses a wedge
    in it that grows. `reports` maps a step to the pool after it.
    """
    num_slots = next(iter(reports.values())).num_slots
    held, used = [], []
    for start, size, first, fill in tracks(reports):
        end = first + len(fill)
        held.append([(first, start), (end, start), (end, start + size), (first, start + size)])
        tops = [(first + i, start + n) for i, n in enumerate(fill)]
        used.append([(first, start), *corners([*tops, (end, tops[-1][1])]), (end, start)])
    polygons(ax, held, PALE, edge=PAPER)
    polygons(ax, used, USED)
    ax.set(xlim=(min(reports), max(ax.get_xlim()[1], max(reports))), ylim=(0, num_slots), yticks=[0, num_slots])
    ax.set(ylabel="slot", title=title)
    thousands(ax.xaxis, ax.yaxis)
    ax.yaxis.labelpad = -14


def tracks(reports: Mapping[int, Pool]) -> list[tuple[int, int, int, list[int]]]:
    """(start, size, first step, slots used at each step) of each holder; the same piece at the next step, with no
    fewer slots used, is the same holder.
    """
    ended: list[tuple[int, int, int, list[int]]] = []
    open_tracks: dict[tuple[int, int], tuple[int, list[int]]] = {}
    for step, report in sorted(reports.items()):
        now = {(start, size): used for start, size, used in report.pieces}
        for piece, (first, fill) in list(open_tracks.items()):
            if first + len(fill) != step or now.get(piece, -1) < fill[-1]:
                ended.append((*piece, first, fill))
                del open_tracks[piece]
        for piece, used in now.items():
            open_tracks.setdefault(piece, (step, []))[1].append(used)
    return ended + [(*piece, first, fill) for piece, (first, fill) in open_tracks.items()]


def corners(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The points at which the line through them turns.

    >>> corners([(0, 0), (1, 1), (2, 2), (3, 2)])
    [(0, 0), (2, 2), (3, 2)]
    """
    inner = zip(points, points[1:], points[2:], strict=False)
    turns = [b for a, b, c in inner if (b[1] - a[1]) * (c[0] - b[0]) != (c[1] - b[1]) * (b[0] - a[0])]
    return [points[0], *turns, points[-1]]


def strip(ax: Axes, pool: Pool, bottom: float = 0.0, height: float = 1.0) -> None:
    """The pool at one moment, slots from left to right: used, reserved and empty, free."""
    polygons(ax, [box(0, pool.num_slots, bottom, height)], PAPER)
    polygons(ax, [box(start, size, bottom, height) for start, size, _ in pool.pieces], PALE, edge=GREY)
    polygons(ax, [box(start, used, bottom, height) for start, _, used in pool.pieces if used], USED)
    polygons(ax, [box(0, pool.num_slots, bottom, height)], "none", edge=INK)
    ax.set(xlim=(-0.004 * pool.num_slots, 1.004 * pool.num_slots), yticks=[])


def refusal(ax: Axes, pool: Pool, waiting: int) -> None:
    """The pool at the moment when a request for `waiting` slots in one piece is refused: every hole with its size,
    and the request, to scale, under the largest.
    """
    strip(ax, pool)
    holes = holes_of(pool)
    polygons(ax, [box(start, size, 0, 1) for start, size in holes], PAPER, edge=ACCENT, width=2)
    for start, size in holes:
        if size > 0.025 * pool.num_slots:
            label(ax, f"{size:,}", (start + size / 2, 1), (0, 4), ACCENT)
    largest = max(holes, key=lambda hole: hole[1])
    left = min(largest[0], pool.num_slots - waiting)
    polygons(ax, [box(left, waiting, -1.0, 0.6)], ACCENT)
    for edge in (largest[0], sum(largest)):
        ax.plot([edge, edge], [-1.0, 0], color=INK, linewidth=0.8, linestyle=":")
    text = f"waiting: needs {waiting:,} in one piece"
    if left > pool.num_slots / 2:
        label(ax, text, (left, -0.7), (-6, 0), ACCENT)
    else:
        label(ax, text, (left + waiting, -0.7), (6, 0), ACCENT)
    key(ax)
    ax.set(ylim=(-1.15, 1.5), xlabel="slot")
    thousands(ax.xaxis)
    bare(ax)


def key(ax: Axes) -> None:
    """What dark, pale and white mean, above the axes on the right."""
    for at, text, color in ((0.68, "used", USED), (0.765, "reserved, empty", PALE), (0.94, "free", PAPER)):
        square = Rectangle((at, 1.045), 0.012, 0.05, facecolor=color, edgecolor=GREY, linewidth=0.6)
        ax.add_artist(square).set(transform=ax.transAxes, clip_on=False)
        ax.text(at + 0.017, 1.04, text, transform=ax.transAxes)


def holes_of(pool: Pool) -> list[tuple[int, int]]:
    """(start, size) of the free pieces."""
    ends = [0] + [start + size for start, size, _ in pool.pieces]
    starts = [start for start, _, _ in pool.pieces] + [pool.num_slots]
    return [(end, start - end) for end, start in zip(ends, starts, strict=True) if start > end]
