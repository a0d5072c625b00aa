"""Drawing for all notebooks: a few colors that stay apart in grey, labels beside the data, small static SVG.

used        dark      keys and values are there
reserved    pale      held, empty: waste inside a piece
free        white
accent      orange    the point of the picture: holes, the slower way, a claim
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
KEY: dict[str, Any] = {"frameon": False, "handlelength": 0.9, "handleheight": 0.8, "columnspacing": 1.4}


class Line(NamedTuple):
    """A line and its label, `shift` points of type away from the last point."""

    x: Sequence[float]
    y: Sequence[float]
    label: str = ""
    color: str = INK
    shift: tuple[float, float] = (5, 0)
    style: str = "-"
    width: float = 1.6


# ---- the page


def style() -> None:
    """Set matplotlib up for all pictures. Text stays text: it is small, and a search or a screen reader finds it.

    Where a font is missing, the next one of FONTS takes its place. None is wider, so labels still fit.
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


def figure(title: str, height: float, rows: int = 1, columns: int = 1, **grid: Any) -> tuple[Figure, list[Axes]]:
    """Return a figure of `height` inches and its axes in reading order.

    Below a prediction, the title says what is drawn. What it shows is for say(), below the picture.
    """
    layout = ConstrainedLayoutEngine(w_pad=0.08, h_pad=0.06, wspace=0.03, hspace=0.05)
    fig = Figure(figsize=(WIDTH, height), layout=layout)
    fig.suptitle(title, x=0.008, ha="left", fontsize=11, fontweight="bold")
    axes = fig.subplots(rows, columns, squeeze=False, **grid)
    return fig, list(axes.flat)


def svg(fig: Figure) -> str:
    """Return the figure as SVG with two decimals, without a date or styles: the same bytes every time."""
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
    r"""Write the same outline in fewer characters.

    >>> compact("M 10.123 20 \nL 30 40.999 \nz")
    'M10.12 20L30 41z'
    """
    path = re.sub(r"\d+\.\d+", lambda number: f"{float(number[0]):.2f}".rstrip("0").rstrip("."), path)
    return re.sub(r"\s*([A-Za-z])\s*", r"\1", path)


def show(fig: Figure) -> None:
    """Show the figure below the cell."""
    display(SVG(data=svg(fig)))


def say(text: str) -> None:
    """Show Markdown below the cell, with numbers that the cell counted or measured."""
    display(Markdown(text))


def now(text: str) -> None:
    """Show Markdown with times that this run measured. No conclusion rests on them."""
    say(f"*Your machine, now.* {text}")


def span(shares: Iterable[float]) -> str:
    """Write the least and the largest share as percentages.

    >>> span([0.1, 0.25, 0.2])
    '10% to 25%'
    """
    least, *_, largest = sorted(shares)
    return f"{least:.0%} to {largest:.0%}"


# ---- quantities


def lines(ax: Axes, series: Iterable[Line], x: str, y: str, log: str = "") -> None:
    """Draw lines with a label at each end. `x` and `y` name the axes and units; `log` is "", "x", "y" or "xy"."""
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
    """Write text `shift` points of type away from the point `at`, with a light background; it may leave the axes."""
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
    """Return a color for text: light colors are too faint for thin strokes."""
    return {ACCENT: "#a85a00", PALE: GREY, GREY: "#5c646b"}.get(color, color)


def percent(axis: Axis) -> None:
    """Show shares of 1 as percentages."""
    axis.set_major_formatter(PercentFormatter(1.0, decimals=0))


def thousands(*axes: Axis) -> None:
    """Show numbers like 12,345."""
    for axis in axes:
        axis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))


def costs(ax: Axes, microseconds: Mapping[str, float], accent: Sequence[str] = ()) -> None:
    """Draw a dot for each time on one logarithmic scale, the shortest at the top."""
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
    """Write a duration with a suitable unit.

    >>> [duration(value) for value in (0.25, 3.14159, 42, 1234, 56789)]
    ['250 ns', '3.1 µs', '42 µs', '1.2 ms', '57 ms']
    """
    for unit, size in (("ms", 1000.0), ("µs", 1.0), ("ns", 0.001)):
        if microseconds >= size or unit == "ns":
            value = microseconds / size
            return f"{value:.1f} {unit}" if value < 10 and unit != "ns" else f"{value:.0f} {unit}"
    raise AssertionError


def legend(ax: Axes, colors: Mapping[str, Any]) -> None:
    """Put a key of the colors above the upper right corner of the axes."""
    place = {"loc": "lower right", "bbox_to_anchor": (1, 1), "borderaxespad": 0.2}
    ax.legend(handles=patches(colors), ncols=len(colors), **place, **KEY)


def patches(colors: Mapping[str, Any]) -> list[Patch]:
    """Return a square of each color with its text, for a legend. White gets an edge."""
    edges = {text: INK if color == PAPER else "none" for text, color in colors.items()}
    return [Patch(facecolor=color, edgecolor=edges[text], label=text, linewidth=0.7) for text, color in colors.items()]


# ---- strokes


def box(left: float, width: float, bottom: float, height: float) -> list[tuple[float, float]]:
    """Return the corners of a rectangle."""
    return [(left, bottom), (left + width, bottom), (left + width, bottom + height), (left, bottom + height)]


def polygons(
    ax: Axes, corners_of: Iterable[Sequence[tuple[float, float]]], fill: str, edge: str = "none", width: float = 0.6
) -> None:
    """Draw all polygons as one path, which keeps the SVG small."""
    paths = [Path([*points, points[0]], closed=True) for points in corners_of]
    if paths:
        ax.add_patch(PathPatch(Path.make_compound_path(*paths), facecolor=fill, edgecolor=edge, linewidth=width))


def bare(ax: Axes) -> None:
    """Remove the lines around the axes, for drawings with edges of their own."""
    ax.spines[:].set_visible(False)
    ax.tick_params(length=0)
