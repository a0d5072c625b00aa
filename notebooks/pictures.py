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
from typing import Any, NamedTuple, Protocol

import matplotlib
from IPython.display import SVG, Markdown, display
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.patches import PathPatch, Rectangle
from matplotlib.path import Path
from matplotlib.ticker import NullLocator, PercentFormatter, StrMethodFormatter

INK, GREY, LIGHT, PALE, PAPER = "#20252a", "#7d858c", "#bcc3c9", "#dde2e6", "#ffffff"
USED, ACCENT = "#14557b", "#e07b00"
SHARES = {"used": USED, "reserved, empty": PALE, "holes": ACCENT, "largest free piece": PAPER}
FONTS = ("DejaVu Sans", "Verdana", "Arial", "sans-serif")
WIDTH = 8.6  # inches, of every picture


class Pool(Protocol):
    """What a stage's report says of a pool, in slots."""

    @property
    def num_slots(self) -> int: ...
    @property
    def pieces(self) -> tuple[tuple[int, int, int], ...]:
        """(start, size, used) of each holder, by start"""


class Line(NamedTuple):
    """A line and its label, which stands at the last point, shifted by `shift` points of type."""

    x: Sequence[float]
    y: Sequence[float]
    label: str = ""
    color: str = INK
    shift: tuple[float, float] = (5, 0)
    style: str = "-"
    width: float = 1.6


class Claim(NamedTuple):
    """A row of the table that a notebook ends with."""

    claim: str
    source: str
    measured: str
    verdict: str


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


def claims_table(claims: Sequence[Claim], shown: int = 3) -> None:
    """The claims as a table; those after the first `shown` are folded."""
    head = "| claim | from | what we measured | verdict |\n|---|---|---|---|\n"
    rows = ["| " + " | ".join(cell.replace("|", "\\|") for cell in claim) + " |" for claim in claims]
    text = head + "\n".join(rows[:shown])
    if len(rows) > shown:
        more = f"\n\n<details><summary>{len(rows) - shown} more</summary>\n\n"
        text += more + head + "\n".join(rows[shown:]) + "\n\n</details>"
    display(Markdown(text))


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


def points(ax: Axes, values: Mapping[float, float], text: str) -> None:
    """What somebody claims: a diamond at each (x, y) with `text`, formatted with y."""
    for x, y in values.items():
        ax.plot(x, y, "D", color=INK, markersize=5)
        label(ax, text.format(y), (x, y), (7, 0))


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


def runs(ax: Axes, x: Sequence[float], runs: Iterable[Sequence[float]], color: str, width: float = 0.9) -> None:
    """Several runs of one quantity: thin lines of one colour, without labels."""
    for run in runs:
        ax.plot(x, run, color=color, linewidth=width)


def percent(axis: Axis) -> None:
    """Shares of 1 as per cent."""
    axis.set_major_formatter(PercentFormatter(1.0))


def thousands(*axes: Axis) -> None:
    """12,345"""
    for axis in axes:
        axis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))


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


def pool_rows(rows: Sequence[tuple[str, Pool]], finding: str) -> Figure:
    """A strip a row, each with a text above it: what stands at the top of the README, one row a stage."""
    fig = Figure(figsize=(WIDTH, 0.72 + 0.74 * len(rows)), layout=ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.1))
    fig.suptitle(finding, x=0.0165, ha="left", fontsize=12)
    ax = fig.subplots()
    for i, (text, pool) in enumerate(rows):
        bottom = -1.9 * i
        strip(ax, pool, bottom)
        ax.text(0, bottom + 1.12, text, va="bottom", ha="left")
    below, slots = -1.9 * len(rows) + 0.9, rows[0][1].num_slots
    key = [(0, "used", USED), (0.09, "reserved, empty", PALE), (0.26, "free", PAPER)]
    for at, text, color in key if any(holes_of(pool) for _, pool in rows) else key[:2]:
        polygons(ax, [box(at * slots, 0.022 * slots, below, 0.5)], color, edge=GREY)
        ax.text((at + 0.029) * slots, below + 0.23, text, va="center", ha="left")
    ax.set(ylim=(below - 0.1, 1.6))
    bare(ax)
    ax.xaxis.set_visible(False)
    return fig


def holes_of(pool: Pool) -> list[tuple[int, int]]:
    """(start, size) of the free pieces."""
    ends = [0] + [start + size for start, size, _ in pool.pieces]
    starts = [start for start, _, _ in pool.pieces] + [pool.num_slots]
    return [(end, start - end) for end, start in zip(ends, starts, strict=True) if start > end]


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
