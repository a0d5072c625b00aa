"""What stage 2's notebook needs: a pool as a square of slots, and what a step moves."""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from notebooks.helpers import pictures
from notebooks.helpers.pictures import ACCENT, GREY, INK, PAPER, USED
from stages.bench.replay import Holder, Moment

# Hues of about the same darkness: in grey a sequence cannot be told from its neighbour by its hue, so one is followed
# in the accent, which is lighter.
HUES = (USED, "#7a2f5f", "#22633a", "#5a4a9c", "#84470f", "#0f6670", "#6d6a12", "#8f2a2a")
TINT = 0.22  # of the hue, where a slot is held and empty
SIDE = 16  # slots of a cell, which is a block; cells in a row; rows


def slots_of(holder: Holder) -> np.ndarray:
    """The slots of a sequence in the order of its tokens, int64 [num_slots]. A block has SIDE slots."""
    if isinstance(holder.slots, range):
        return np.array(holder.slots)
    return (np.array(holder.slots)[:, None] * SIDE + np.arange(SIDE)).ravel()


def square(holders: Sequence[Holder], num_slots: int, followed: str) -> np.ndarray:
    """The pool as an image, [SIDE * SIDE, SIDE * SIDE, 3]: a pixel is a slot wide, a row of cells SIDE pixels high."""
    image = np.ones((num_slots, 3))
    for holder in holders:
        hue = ACCENT if holder.request_id == followed else HUES[int(holder.request_id) % len(HUES)]
        slots, color = slots_of(holder), np.array(to_rgb(hue))
        image[slots] = TINT * color + 1 - TINT
        image[slots[: holder.num_computed_tokens]] = color
    image = image.reshape(-1, SIDE * SIDE, 3).repeat(SIDE, axis=0)
    image[::SIDE] = 1
    if not all(isinstance(holder.slots, range) for holder in holders):
        image[:, ::SIDE] = 1  # an edge of each block
    return image


def squares(finding: str, rows: Mapping[str, Sequence[Moment]], steps: Sequence[int]) -> Figure:
    """The pool at some steps, a row for each way to hand it out. `rows` maps a title to the moment of each step."""
    fig, axes = pictures.figure(finding, 0.75 + 1.62 * len(rows), rows=len(rows), columns=len(steps))
    for i, (title, moments) in enumerate(rows.items()):
        seen = [holder.request_id for step in steps for holder in moments[step].holders]
        followed = max(seen, key=seen.count)
        line = axes[i * len(steps) : (i + 1) * len(steps)]
        for ax, step in zip(line, steps, strict=True):
            pool = square(moments[step].holders, moments[step].report.num_slots, followed)
            ax.imshow(pool, interpolation="none")
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
