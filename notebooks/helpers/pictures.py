"""What the notebooks draw with: few colours that stay apart in grey, labels at the thing itself, small static SVG.

used        dark      keys and values are there
reserved    pale      held, empty: waste inside a piece
free        white
accent      orange    what the picture is about: holes, the slower way, a claim
"""

import io
import re
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any, NamedTuple

import matplotlib
from IPython.display import SVG, Markdown, display
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.patches import Patch, PathPatch
from matplotlib.path import Path
from matplotlib.ticker import FuncFormatter, NullLocator, PercentFormatter, StrMethodFormatter

INK, GREY, LIGHT, PALE, PAPER = "#20252a", "#7d858c", "#bcc3c9", "#dde2e6", "#ffffff"
USED, ACCENT = "#14557b", "#e07b00"
FONTS = ("DejaVu Sans", "Verdana", "Arial", "sans-serif")
WIDTH = 8.6  # inches, of every picture


class Line(NamedTuple):
    """A line and its label, which stands at the last point, shifted by `shift` points of type."""

    x: Sequence[float]
    y: Sequence[float]
    label: str = ""
    color: str = INK
    shift: tuple[float, float] = (5, 0)
    style: str = "-"
    width: float = 1.6


# ---- the page


def style() -> None:
    """Settings for all pictures. Text stays text: small, found by a search, read aloud. Where the font is missing the
    next one of FONTS takes its place; none of them is wider, so that labels fit all the same.
    """
    matplotlib.rcParams.update(
        {
            "svg.fonttype": "none",
            "svg.hashsalt": "nanovllm",
            "font.family": FONTS[0],
            "font.size": 9,
            "text.color": INK,
            "axes.edgecolor": GREY,
            "axes.labelcolor": INK,
            "axes.linewidth": 0.8,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.titlesize": 9,
            "axes.titlelocation": "left",
            "xtick.color": GREY,
            "ytick.color": GREY,
            "xtick.labelcolor": INK,
            "ytick.labelcolor": INK,
            "lines.solid_capstyle": "round",
            "figure.facecolor": PAPER,
        }
    )


def figure(finding: str, height: float, rows: int = 1, columns: int = 1, **grid: Any) -> tuple[Figure, list[Axes]]:
    """A figure whose title states what it shows, and its axes in reading order. `height` in inches."""
    layout = ConstrainedLayoutEngine(w_pad=0.08, h_pad=0.06, wspace=0.03, hspace=0.05)
    fig = Figure(figsize=(WIDTH, height), layout=layout)
    fig.suptitle(finding, x=0.008, ha="left", fontsize=11, fontweight="bold")
    axes = fig.subplots(rows, columns, squeeze=False, **grid)
    return fig, list(axes.flat)


def svg(fig: Figure) -> str:
    """The figure as SVG: no date, no style for the page around it, two decimals; the same bytes every time."""
    buffer = io.StringIO()
    fig.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>|<!--.*?-->|<style.*?</style>", "", text, flags=re.DOTALL)
    head, rest = text.split(">", 1)
    text = f'{head} stroke-linejoin="round" role="img"><title>{escape(fig.get_suptitle())}</title>{rest}'
    text = re.sub(r'<g id="[^"]*"', "<g", text)
    text = text.replace(f"'{FONTS[0]}'", ", ".join(f"'{font}'" if " " in font else font for font in FONTS))
    text = re.sub(r'(?<= d=")[^"]*', lambda path: compact(path[0]), text)
    text = re.sub(r"<defs>\s*</defs>|<g>\s*</g>|<g/>", "", text)
    return re.sub(r"\s*\n\s*", "\n", text)


def compact(path: str) -> str:
    """The same outline in fewer characters.

    >>> compact("M 10.123 20 \\nL 30 40.999 \\nz")
    'M10.12 20L30 41z'
    """
    path = re.sub(r"\d+\.\d+", lambda number: f"{float(number[0]):.2f}".rstrip("0").rstrip("."), path)
    return re.sub(r"\s*([A-Za-z])\s*", r"\1", path)


def show(fig: Figure) -> None:
    """Put the figure below the cell."""
    display(SVG(data=svg(fig)))


def say(text: str) -> None:
    """Put a sentence below the cell: Markdown with the numbers that the cell measured."""
    display(Markdown(text))


def now(text: str) -> None:
    """say(), of times that this run has measured: nothing is judged by them."""
    say(f"*Your machine, now.* {text}")


def span(shares: Iterable[float]) -> str:
    """The least and the largest, in per cent.

    >>> span([0.1, 0.25, 0.2])
    '10% to 25%'
    """
    least, *_, largest = sorted(shares)
    return f"{least:.0%} to {largest:.0%}"


# ---- quantities


def lines(ax: Axes, series: Iterable[Line], x: str, y: str, log: str = "") -> None:
    """Lines with their labels at their ends; `x` and `y` name the axes with their units; `log`: "", "x", "y", "xy"."""
    for axis, name in ((ax.xaxis, "x"), (ax.yaxis, "y")):
        if name in log:
            ax.set(**{f"{name}scale": "log"})
            axis.set_minor_locator(NullLocator())
        thousands(axis)
    for line in series:
        ax.plot(line.x, line.y, line.style, color=line.color, linewidth=line.width, markersize=4)
        label(ax, line.label, (line.x[-1], line.y[-1]), line.shift, line.color)
    ax.set(xlabel=x, ylabel=y)


def label(
    ax: Axes, text: str, at: tuple[float, float], shift: tuple[float, float] = (5, 0), color: str = INK, ha: str = ""
) -> None:
    """Text beside the point `at`, `shift` points of type away, on a little paper; it may stand outside of the axes."""
    side = ha or ("right" if shift[0] < 0 else "left" if shift[0] > 0 else "center")
    va = "center" if shift[0] and not shift[1] else "bottom" if shift[1] >= 0 else "top"
    ax.annotate(
        text,
        at,
        shift,
        textcoords="offset points",
        color=darker(color),
        ha=side,
        va=va,
        annotation_clip=False,
        bbox={"boxstyle": "square,pad=0.1", "facecolor": PAPER, "edgecolor": "none", "alpha": 0.8},
    )


def darker(color: str) -> str:
    """A colour for type: the accent is too light for thin strokes."""
    return {ACCENT: "#a85a00", PALE: GREY, GREY: "#5c646b"}.get(color, color)


def percent(axis: Axis) -> None:
    """Shares of 1 as per cent."""
    axis.set_major_formatter(PercentFormatter(1.0))


def thousands(*axes: Axis) -> None:
    """12,345"""
    for axis in axes:
        axis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))


def costs(ax: Axes, microseconds: Mapping[str, float], accent: Sequence[str] = ()) -> None:
    """A dot for each thing on one logarithmic scale of time, the cheapest at the top."""
    names = sorted(microseconds, key=microseconds.get)
    for row, name in enumerate(names):
        color, value = ACCENT if name in accent else USED, microseconds[name]
        ax.hlines(-row, min(microseconds.values()) / 2, value, color=PALE, linewidth=1)
        ax.plot(value, -row, "o", color=color, markersize=6)
        label(ax, duration(value), (value, -row), (8, 0), color)
    ax.set(xscale="log", yticks=[-row for row in range(len(names))], yticklabels=names)
    ax.set(xlim=(min(microseconds.values()) / 2, 4 * max(microseconds.values())), xlabel="time")
    ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: duration(value)))
    ax.xaxis.set_minor_locator(NullLocator())
    ax.spines["left"].set_visible(False)
    ax.tick_params(axis="y", length=0, labelcolor=INK)


def duration(microseconds: float) -> str:
    """
    >>> [duration(value) for value in (0.25, 3.14159, 42, 1234, 56789)]
    ['250 ns', '3.1 µs', '42 µs', '1.2 ms', '57 ms']
    """
    for unit, size in (("ms", 1000.0), ("µs", 1.0), ("ns", 0.001)):
        if microseconds >= size or unit == "ns":
            value = microseconds / size
            return f"{value:.1f} {unit}" if value < 10 and unit != "ns" else f"{value:.0f} {unit}"
    raise AssertionError


def legend(ax: Axes, colors: Mapping[str, str]) -> None:
    """What the colours mean, above the upper right corner of the axes. White has an edge of ink."""
    handles = [
        Patch(facecolor=color, edgecolor=INK if color == PAPER else "none", label=text, linewidth=0.7)
        for text, color in colors.items()
    ]
    look = {"frameon": False, "handlelength": 0.9, "handleheight": 0.8, "columnspacing": 1.4, "borderaxespad": 0.2}
    ax.legend(handles=handles, loc="lower right", bbox_to_anchor=(1, 1), ncols=len(handles), **look)


# ---- strokes


def box(left: float, width: float, bottom: float, height: float) -> list[tuple[float, float]]:
    """The corners of a rectangle."""
    return [(left, bottom), (left + width, bottom), (left + width, bottom + height), (left, bottom + height)]


def polygons(
    ax: Axes, corners_of: Iterable[Sequence[tuple[float, float]]], fill: str, edge: str = "none", width: float = 0.6
) -> None:
    """All polygons as one path: a hundred cost little more than one."""
    paths = [Path([*points, points[0]], closed=True) for points in corners_of]
    if paths:
        ax.add_patch(PathPatch(Path.make_compound_path(*paths), facecolor=fill, edgecolor=edge, linewidth=width))


def bare(ax: Axes) -> None:
    """No lines around the axes: what is drawn has its own."""
    ax.spines[:].set_visible(False)
    ax.tick_params(length=0)
