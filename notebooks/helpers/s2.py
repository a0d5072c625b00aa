"""What stage 2's notebook needs: a pool as a square of slots, sequences of a given length."""

import itertools
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from notebooks.helpers import pictures
from notebooks.helpers.pictures import ACCENT, GREY, INK, PAPER, USED

# Hues of about the same darkness: in grey a sequence cannot be told from its neighbour by its hue, so one is followed
# in the accent, which is lighter.
HUES = (USED, "#7a2f5f", "#22633a", "#5a4a9c", "#84470f", "#0f6670", "#6d6a12", "#8f2a2a")
TINT = 0.22  # of the hue, where a slot is held and empty
SIDE = 16  # cells of SIDE slots in a row, and rows


class Pieces(NamedTuple):
    """A pool as s1.Pool has it: of a sequence in blocks, every block is a piece."""

    num_slots: int
    pieces: tuple[tuple[int, int, int], ...]


class Holder(NamedTuple):
    number: int  # the same as long as the same sequence holds these slots
    slots: np.ndarray  # in the order of its tokens
    used: int


def as_pieces(report: Any) -> Pieces:
    """A report of stage 2 for s1.strip."""
    size = report.block_size
    pieces = [
        (block * size, size, min(max(used - i * size, 0), size))
        for table, used in report.tables
        for i, block in enumerate(table)
    ]
    return Pieces(report.num_slots, tuple(sorted(pieces)))


def slots_held(report: Any) -> dict[Hashable, tuple[np.ndarray, int]]:
    """For each holder, by what stays the same during its life: its slots in the order of its tokens, and how many it
    uses. Of stage 1 that is its piece, of stage 2 the first block of its table.
    """
    if hasattr(report, "pieces"):
        return {(start, size): (np.arange(start, start + size), used) for start, size, used in report.pieces}
    cell = np.arange(report.block_size)
    blocks = ((np.array(table)[:, None] * report.block_size + cell, used) for table, used in report.tables)
    return {int(slots[0, 0]): (slots.ravel(), used) for slots, used in blocks}


def follow(reports: Sequence[Any]) -> Iterator[list[Holder]]:
    """The holders at each step. One that uses exactly one slot more than at the step before is the same sequence."""
    numbers, before = itertools.count(), {}
    for report in reports:
        now = {}
        for key, (slots, used) in slots_held(report).items():
            last = before.get(key)
            number = last.number if last and used == last.used + 1 else next(numbers)
            now[key] = Holder(number, slots, used)
        before = now
        yield list(now.values())


def square(holders: Sequence[Holder], num_slots: int, followed: int, tiles: bool) -> np.ndarray:
    """The pool as an image, [SIDE * SIDE, SIDE * SIDE, 3]: a pixel is a slot wide, a row of cells SIDE pixels high."""
    image = np.ones((num_slots, 3))
    for holder in holders:
        hue = np.array(to_rgb(ACCENT if holder.number == followed else HUES[holder.number % len(HUES)]))
        image[holder.slots] = TINT * hue + 1 - TINT
        image[holder.slots[: holder.used]] = hue
    image = image.reshape(-1, SIDE * SIDE, 3).repeat(SIDE, axis=0)
    image[::SIDE] = 1
    if tiles:
        image[:, ::SIDE] = 1
    return image


def squares(finding: str, rows: Mapping[str, Sequence[Any]], steps: Sequence[int]) -> Figure:
    """The pool at some steps, a row for each way to hand it out. `rows` maps a title to the report after each step."""
    fig, axes = pictures.figure(finding, 0.75 + 1.62 * len(rows), rows=len(rows), columns=len(steps))
    for i, (title, reports) in enumerate(rows.items()):
        frames = list(follow(reports[: max(steps) + 1]))
        seen = [holder.number for step in steps for holder in frames[step]]
        followed = max(seen, key=seen.count)
        line = axes[i * len(steps) : (i + 1) * len(steps)]
        for ax, step in zip(line, steps, strict=True):
            report = reports[step]
            ax.imshow(square(frames[step], report.num_slots, followed, hasattr(report, "tables")), interpolation="none")
            ax.set(xticks=[], yticks=[], title=" ")
            ax.spines[:].set(visible=True, color=GREY)
        beside(line[0], 0.0, 1.05, title)
    for ax, step in zip(line, steps, strict=True):
        ax.set_xlabel(f"step {step}\n\n")
    key(line[0])
    return fig


def key(ax: Axes) -> None:
    """What the shades mean, below the axes."""
    marks = (("used", USED), ("held, empty", tint(USED)), ("free", PAPER), ("used by one sequence, followed", ACCENT))
    for at, (text, color) in zip((0.0, 0.52, 1.42, 1.92), marks, strict=True):
        patch = Rectangle((at, -0.34), 0.08, 0.08, facecolor=color, edgecolor=GREY, linewidth=0.6)
        ax.add_artist(patch).set(transform=ax.transAxes, clip_on=False, in_layout=False)
        beside(ax, at + 0.12, -0.35, text)


def beside(ax: Axes, x: float, y: float, text: str) -> None:
    """Text at a place in shares of the axes, wider than they may be: the layout does not make room for it."""
    ax.text(x, y, text, transform=ax.transAxes, va="bottom").set_in_layout(False)


def tint(color: str) -> tuple[float, ...]:
    return tuple(TINT * part + 1 - TINT for part in to_rgb(color))


def moved_bytes(ax: Axes, moved: Mapping[str, Mapping[str, float]]) -> None:
    """What a step moves, in MB, a bar for each stage, its parts end to end, to scale."""
    looks = {
        "new token written": (INK, ""),
        "read by attention": (USED, ""),
        "read to be copied": (GREY, ""),
        "written by the copy": (ACCENT, "////"),
    }
    most = max(sum(parts.values()) for parts in moved.values())
    for row, parts in enumerate(moved.values()):
        left = 0.0
        for name, width in parts.items():
            color, hatch = looks[name]
            ax.barh(row, width, left=left, height=0.62, color=color, hatch=hatch, edgecolor=PAPER, linewidth=0.8)
            if width > 0.05 * most:
                ink, paper = (INK, {"facecolor": PAPER, "edgecolor": "none", "pad": 2}) if hatch else (PAPER, None)
                middle = left + width / 2
                ax.text(middle, row, f"{name}: {width:.0f} MB", ha="center", va="center", color=ink, bbox=paper)
            left += width
    ax.set(yticks=range(len(moved)), yticklabels=list(moved), ylim=(len(moved) - 0.5, -0.5), xlim=(0, most))
    ax.set(xlabel="MB of keys and values in a decode step; what is new is too thin to see")
    ax.spines["left"].set_visible(False)
    ax.tick_params(axis="y", length=0)
