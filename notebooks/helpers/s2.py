"""Helpers of stage 2's notebook: a pool as a square of slots, and the bytes that a step moves."""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure

from notebooks.helpers import pictures
from notebooks.helpers.pictures import ACCENT, GREY, INK, PAPER, USED
from stages.bench.replay import Holder, Moment

# Hues of about the same darkness. In grey you cannot tell neighbors apart by hue, so the one sequence to follow has the
# accent, which is lighter.
HUES = (USED, "#7a2f5f", "#22633a", "#5a4a9c", "#84470f", "#0f6670", "#6d6a12", "#8f2a2a")
TINT = 0.22  # of the hue, for a slot that is held and empty
BLOCK, COLUMNS = 16, 32  # slots of a block, and blocks in a row of the square


def slots_of(holder: Holder) -> np.ndarray:
    """Return the slots of a sequence in the order of its tokens, int64 [num_slots]."""
    if isinstance(holder.slots, range):
        return np.array(holder.slots)
    return (np.array(holder.slots)[:, None] * BLOCK + np.arange(BLOCK)).ravel()


def square(holders: Sequence[Holder], num_slots: int, followed: str) -> np.ndarray:
    """Return the pool as an image, [rows * height, width, 3].

    A slot is one pixel wide, and a row of blocks is high enough to make 16 rows a square.
    """
    image = np.ones((num_slots, 3))
    for holder in holders:
        hue = ACCENT if holder.request_id == followed else HUES[int(holder.request_id) % len(HUES)]
        slots = slots_of(holder)
        image[slots] = tint(hue)
        image[slots[: holder.num_computed_tokens]] = to_rgb(hue)
    height = 2 * BLOCK
    image = image.reshape(-1, COLUMNS * BLOCK, 3).repeat(height, axis=0)
    image[::height] = 1
    if not all(isinstance(holder.slots, range) for holder in holders):
        image[:, ::BLOCK] = 1  # an edge of each block
    return image


def squares(heading: str, rows: Mapping[str, Mapping[int, Moment]], steps: Sequence[int]) -> Figure:
    """Draw the pool at some steps, a row for each way to hand it out. `rows` maps a title to the moment per step."""
    fig, axes = pictures.figure(heading, 0.75 + 1.62 * len(rows), rows=len(rows), columns=len(steps))
    for i, (title, moments) in enumerate(rows.items()):
        seen = [holder.request_id for step in steps for holder in moments[step].holders]
        followed = max(seen, key=seen.count)
        line = axes[i * len(steps) : (i + 1) * len(steps)]
        for ax, step in zip(line, steps, strict=True):
            pool = square(moments[step].holders, moments[step].report.num_slots, followed)
            ax.imshow(pool, interpolation="none")
            ax.set(xticks=[], yticks=[], title=" ")
            ax.spines[:].set(visible=True, color=GREY)
        text = line[0].text(0.0, 1.05, title, transform=line[0].transAxes, va="bottom")
        text.set_in_layout(False)  # it is wider than its axes
    for ax, step in zip(line, steps, strict=True):
        ax.set_xlabel(f"step {step}")
    shades = {"used": USED, "held, empty": tint(USED), "free": PAPER, "used by one sequence, to follow": ACCENT}
    fig.legend(handles=pictures.patches(shades), loc="outside lower left", ncols=len(shades), **pictures.KEY)
    return fig


def tint(color: str) -> tuple[float, ...]:
    return tuple(TINT * part + 1 - TINT for part in to_rgb(color))


def moved_bytes(ax: Axes, moved: Mapping[str, Mapping[str, float]]) -> None:
    """Draw the MB that a step moves, to scale: a bar for each stage, with its parts end to end."""
    colors = {"written": INK, "read by attention": USED, "read to be copied": GREY, "written by the copy": ACCENT}
    most = max(sum(parts.values()) for parts in moved.values())
    for row, parts in enumerate(moved.values()):
        left = 0.0
        for name, width in parts.items():
            ax.barh(row, width, left=left, height=0.62, color=colors[name], edgecolor=PAPER, linewidth=0.8)
            if width > 0.05 * most:
                ink = INK if colors[name] == ACCENT else PAPER
                ax.text(left + width / 2, row, f"{name}: {width:.0f} MB", ha="center", va="center", color=ink)
            left += width
    ax.set(yticks=range(len(moved)), yticklabels=list(moved), ylim=(len(moved) - 0.5, -0.5), xlim=(0, most))
    ax.set(xlabel="MB of keys and values in a decode step (the new token's are too few to see)")
    ax.spines["left"].set_visible(False)
    ax.tick_params(axis="y", length=0)
