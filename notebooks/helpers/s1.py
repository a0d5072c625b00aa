"""Helpers of stage 1's notebook: shares of a pool, the pool over time, and the pool when a request is refused."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from matplotlib.axes import Axes

from notebooks.helpers import pictures
from notebooks.helpers.pictures import ACCENT, GREY, INK, PALE, PAPER, USED, box, label, polygons, thousands

SHARES = {"used": USED, "reserved, empty": PALE, "holes": ACCENT, "largest free piece": PAPER}
STATES = {"used": USED, "reserved, empty": PALE, "free": PAPER}  # of a slot


class Pool(Protocol):
    """A stage's report about its pool, in slots."""

    @property
    def num_slots(self) -> int: ...
    @property
    def pieces(self) -> tuple[tuple[int, int, int], ...]:
        """Return (start, size, used) of each reserved piece, in order of start."""


# ---- a pool in use


def shares(reports: list[Any]) -> dict[str, list[float]]:
    """Return how each report divides its pool, in shares that add up to 1.

    Holes are the free slots outside the largest free piece.
    """
    return {
        "used": [report.used / report.num_slots for report in reports],
        "reserved, empty": [report.wasted / report.num_slots for report in reports],
        "holes": [1 - (report.held + report.largest_free) / report.num_slots for report in reports],
        "largest free piece": [report.largest_free / report.num_slots for report in reports],
    }


def external_fragmentation(report: Any) -> float:
    """Return 1 - largest free piece / free slots: 0 if they are in one piece, near 1 if they are scattered."""
    free = report.num_slots - report.held
    return 1 - report.largest_free / free if free else 0.0


# ---- pictures


def stacked_shares(ax: Axes, shares: Mapping[str, Sequence[float]], every: int = 1, title: str = "") -> None:
    """Stack the shares of a pool from the bottom, drawing one step in `every`. Label each band that has room."""
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


def pool_over_time(ax: Axes, reports: Mapping[int, Pool], title: str = "") -> None:
    """Draw the pool from bottom to top against the step. Each piece is a pale bar with a dark wedge of used slots.

    `reports` maps a step to the pool after it.
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
    """Return (start, size, first step, slots used at each step) of each sequence.

    The same piece in the next step, with no fewer slots used, belongs to the same sequence.
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
    """Return the points at which the line through them turns.

    >>> corners([(0, 0), (1, 1), (2, 2), (3, 2)])
    [(0, 0), (2, 2), (3, 2)]
    """
    inner = zip(points, points[1:], points[2:], strict=False)
    turns = [b for a, b, c in inner if (b[1] - a[1]) * (c[0] - b[0]) != (c[1] - b[1]) * (b[0] - a[0])]
    return [points[0], *turns, points[-1]]


def strip(ax: Axes, pool: Pool, bottom: float = 0.0, height: float = 1.0) -> None:
    """Draw the pool at one moment as a strip of slots: used, reserved and empty, free."""
    polygons(ax, [box(0, pool.num_slots, bottom, height)], PAPER)
    polygons(ax, [box(start, size, bottom, height) for start, size, _ in pool.pieces], PALE, edge=GREY)
    polygons(ax, [box(start, used, bottom, height) for start, _, used in pool.pieces if used], USED)
    polygons(ax, [box(0, pool.num_slots, bottom, height)], "none", edge=INK)
    ax.set(xlim=(-0.004 * pool.num_slots, 1.004 * pool.num_slots), yticks=[])


def refusal(ax: Axes, pool: Pool, waiting: int) -> None:
    """Draw the pool with the size of each large hole, and below it, to scale, a request for `waiting` slots."""
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
    is_right = left > pool.num_slots / 2
    at, shift = (left, -6) if is_right else (left + waiting, 6)
    label(ax, f"waiting: needs {waiting:,} in one piece", (at, -0.7), (shift, 0), ACCENT)
    pictures.legend(ax, STATES)
    ax.set(ylim=(-1.15, 1.5), xlabel="slot")
    thousands(ax.xaxis)
    pictures.bare(ax)


def holes_of(pool: Pool) -> list[tuple[int, int]]:
    """Return (start, size) of the free pieces."""
    ends = [0] + [start + size for start, size, _ in pool.pieces]
    starts = [start for start, _, _ in pool.pieces] + [pool.num_slots]
    return [(end, start - end) for end, start in zip(ends, starts, strict=True) if start > end]
