"""Texts and drawings of the package's notebook: available kernels, a trace of reads, parts, pieces.

ways.py has a decode step in five ways, roofline.py what each of them takes, timelines.py a step over time, apart.py
kernels that Python runs, taking.py compiled code that keeps a diary, paged.py a GPU's attention beside its twin and the
CPU's, launches.py what a step starts.
"""

from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter

from nanovllm.backends.cpu.backend import missing_requirement
from nanovllm.backends.cpu.compiler import find_folder, is_complete
from notebooks.helpers import pictures
from notebooks.helpers.pictures import ACCENT, INK, LIGHT, PALE, PAPER, USED, Line


def what_is_there(*dtypes: str) -> str:
    """Say in a sentence whether kernels are installed and compiled."""
    if why := missing_requirement():
        return f"No kernels here: {why}. What follows shows plain operations alone."
    missing = [dtype for dtype in dtypes if not is_compiled(dtype)]
    if missing:
        return f"Kernels for {' and '.join(missing)} are being compiled, once on this machine: please wait."
    return f"Kernels for {' and '.join(dtypes)} have been compiled on this machine before: they are loaded."


def is_compiled(dtype: str) -> bool:
    folder = find_folder(dtype)
    return folder is not None and is_complete(folder)


def draw_trace(ax: Axes, trace: Sequence[str], title: str) -> None:
    """Draw what a kernel does, in order: it reads the weight, it reads rows of x, it multiplies and adds."""
    colors = {"weight": ACCENT, "x": USED, "fma": PALE}
    for what, color in colors.items():
        boxes = [pictures.box(i + 0.06, 0.88, 0, 1) for i, done in enumerate(trace) if done == what]
        pictures.polygons(ax, boxes, color)
    ax.set(ylim=(-0.05, 1.05), yticks=[0.5], yticklabels=[title], xticks=[])
    ax.tick_params(axis="y", length=0, labelcolor=INK)
    ax.spines[:].set_visible(False)


def draw_parts(top: Axes, bottom: Axes, parts: Sequence[Any], row: int) -> None:
    """Draw a row's highest score and sum after each part, with a line where the sum falls."""
    at, sums = range(1, len(parts) + 1), [part.sums[row] for part in parts]
    falls = [i for i in at[1:] if sums[i - 1] < sums[i - 2]]
    for ax in (top, bottom):
        ax.vlines(falls, 0, 1, transform=ax.get_xaxis_transform(), color=LIGHT)
    pictures.lines(top, [Line(at, [part.peaks[row] for part in parts], style="o-", color=USED)], "", "peak")
    pictures.lines(bottom, [Line(at, sums, style="o-", color=ACCENT)], "part (a line: the sum falls)", "sum")
    top.set(xticks=list(at))
    bottom.set(xticks=list(at), ylim=(0, None))


def draw_pieces(ax: Axes, pieces: Sequence[Any], title: str) -> None:
    """Two strips, one a worker; in each its pieces, with their numbers."""
    for worker, color in ((0, USED), (1, ACCENT)):
        mine = [piece for piece in pieces if piece.worker == worker]
        boxes = [pictures.box(p.start, p.end - p.start, 1.05 - worker, 0.9) for p in mine]
        pictures.polygons(ax, boxes, color, PAPER, 0.8)
        for piece in mine:
            at = (piece.start + piece.end) / 2, 1.5 - worker
            ax.text(*at, str(piece.number), ha="center", va="center", fontsize=6.5, color=PAPER)
    ax.set(xlim=(0, max(ax.get_xlim()[1], *(piece.end for piece in pieces))))
    ax.set(ylim=(0, 2), yticks=[0.5, 1.5], yticklabels=["helper", "main"], title=title)
    ax.tick_params(axis="y", length=0, labelcolor=INK)
    ax.spines["left"].set_visible(False)
    ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: pictures.duration(value) if value else "0"))
