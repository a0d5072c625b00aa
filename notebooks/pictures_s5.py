"""What stage 5's notebook draws with: beams as rows of blocks, and what is held over time."""

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from notebooks import pictures
from notebooks.forks import BeamStep, Moment
from notebooks.pictures import ACCENT, GREY, INK, PALE, PAPER, USED

SHADES = {1: PAPER, 2: PALE, 3: "#8fa9bb"}  # of a block, by how many hold it; more: USED


def beam_steps(steps: Sequence[BeamStep], first: int, finding: str) -> Figure:
    """A panel a step, a row a beam: its blocks in order, each with its number and how many hold it, the more the
    darker, and the beam's last token. A block that was copied for this step has an orange edge. `first` is the number
    of the first step.
    """
    rows = max(len(step.beams) for step in steps)
    longest = max(len(beam.table) for step in steps for beam in step.beams)
    fig, axes = pictures.figure(finding, 1.3 + 0.46 * rows, columns=len(steps))
    for number, (ax, step) in enumerate(zip(axes, steps, strict=True), start=first):
        targets = {target for _, target in step.copies}
        for row, beam in enumerate(step.beams):
            for column, block in enumerate(beam.table):
                cell(ax, column, -row, block, step.ref_counts[block], block in targets)
            ax.text(len(beam.table) + 0.15, -row, beam.text, va="center", fontsize=8)
        ax.set(xlim=(-0.05, longest + 2.3), ylim=(-rows + 0.4, 0.6), xticks=[], yticks=[], title=f"step {number}")
        ax.set_xlabel("\n")  # room for the key
        pictures.bare(ax)
    key(axes[0])
    return fig


def cell(ax: Axes, column: int, row: int, block: int, count: int, is_copy: bool) -> None:
    """A block of a table."""
    fill = SHADES.get(count, USED)
    edge, width = (ACCENT, 2.0) if is_copy else (GREY, 0.7)
    ax.add_patch(Rectangle((column + 0.05, row - 0.4), 0.9, 0.8, facecolor=fill, edgecolor=edge, linewidth=width))
    ink = PAPER if fill == USED else INK
    ax.text(column + 0.5, row + 0.14, str(block), ha="center", va="center", color=ink, fontsize=8.5)
    ax.text(column + 0.5, row - 0.22, f"×{count}", ha="center", va="center", color=ink, fontsize=6.5)


def key(ax: Axes) -> None:
    """What the shades mean, below a panel; wider than it may be."""
    marks = [*((f"×{count}: held by {count}", color, GREY) for count, color in SHADES.items())]
    for i, (text, fill, edge) in enumerate([*marks, ("copied for this step", PAPER, ACCENT)]):
        left = 0.02 + 0.95 * i
        width = 1.5 if edge == ACCENT else 0.7
        patch = Rectangle((left, -0.2), 0.12, 0.11, facecolor=fill, edgecolor=edge, linewidth=width)
        ax.add_artist(patch).set(transform=ax.transAxes, clip_on=False, in_layout=False)
        ax.text(left + 0.17, -0.2, text, transform=ax.transAxes, va="bottom").set_in_layout(False)


def held_over_time(ax: Axes, runs: Mapping[str, Sequence[Moment]], label_at: Sequence[int]) -> None:
    """Blocks held after each step, a line for each of two runs, whose names end above and below a step of `label_at`;
    and a mark with a number where blocks were copied.
    """
    looks = ((USED, "-", (0, 4)), (INK, "--", (0, -12)))
    for (name, moments), at, (color, style, shift) in zip(runs.items(), label_at, looks, strict=False):
        blocks = [moment.blocks for moment in moments]
        ax.step(range(len(blocks)), blocks, style, where="post", color=color, linewidth=1.6)
        pictures.label(ax, name, (at, blocks[at]), shift, color, ha="right")
        copies = {i: moment.copied for i, moment in enumerate(moments) if moment.copied}
        for step, count in copies.items():
            ax.plot(step, blocks[step], "o", color=ACCENT, markersize=6)
            pictures.label(ax, f"{count} copies", (step, blocks[step]), (-2, 8), ACCENT, ha="left")
    ax.set(xlabel="step", ylabel="blocks held", ylim=(0, None))


def shared_and_not(ax: Axes, x: Sequence[float], blocks: Mapping[str, Sequence[float]], xlabel: str) -> None:
    """Blocks by something, under several names; the first is the one that costs too much, the last the least that
    can be.
    """
    looks = ((ACCENT, "-"), (USED, "o-"), (GREY, "--"))
    series = [
        pictures.Line(x, values, name, color, style=style)
        for (name, values), (color, style) in zip(blocks.items(), looks, strict=False)
    ]
    pictures.lines(ax, series, xlabel, "blocks")
    ax.set(ylim=(0, None))
