"""An animated SVG without a script: pools that fill and empty, side by side, as an image in a README may move.

Each slot of a pool is a small rectangle with a colour for each step. CSS keyframes change it; a reader who wants no
motion sees one step, the same that the file shows where styles are not read.
"""

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import NamedTuple
from xml.sax.saxutils import escape

COLUMNS, GAP, MARGIN = 10, 5, 16  # blocks in a row of the grid, and pixels
SLOT_WIDTH, SLOT_HEIGHT = 4, 26
HEADING, CAPTION = 30, 22  # heights
INK, QUIET, GROUND, LINE = "#24292f", "#57606a", "#ffffff", "#d0d7de"


class Panel(NamedTuple):
    """A pool over time. Slot i of step t has the colour colours[t][i]; captions[t] stands below the pool."""

    title: str
    block_size: int
    colours: Sequence[Sequence[str]]
    captions: Sequence[str]


def animate(panels: Sequence[Panel], still: int, seconds: float, label: str) -> str:
    """The panels as one SVG; all have the same number of steps, and `still` is the step without motion."""
    widths = [panel_width(panel) for panel in panels]
    height = max(panel_height(panel) for panel in panels) + 2 * MARGIN
    width = sum(widths) + MARGIN * 3 * (len(panels) - 1) + 2 * MARGIN
    styles: list[str] = []
    shapes: list[str] = []
    left = MARGIN
    for panel, panel_wide in zip(panels, widths, strict=True):
        rules, drawn = draw(panel, still, left, len(styles))
        styles += rules
        shapes += drawn
        left += panel_wide + 3 * MARGIN
    return "\n".join([
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" role="img">',
        f"<title>{escape(label)}</title>",
        f"<style>text{{font:13px system-ui,sans-serif;fill:{QUIET}}}.t{{font-weight:600;fill:{INK}}}",
        f".a{{animation:{seconds:g}s step-end infinite}}",
        *styles,
        "@media(prefers-reduced-motion:reduce){.a{animation:none}}</style>",
        f'<rect width="{width}" height="{height}" rx="6" fill="{GROUND}"/>',
        *shapes,
        "</svg>\n",
    ])  # fmt: skip


def panel_width(panel: Panel) -> int:
    return COLUMNS * (panel.block_size * SLOT_WIDTH + GAP) - GAP


def panel_height(panel: Panel) -> int:
    num_rows = -(-len(panel.colours[0]) // (COLUMNS * panel.block_size))
    return HEADING + num_rows * (SLOT_HEIGHT + GAP) + CAPTION


def draw(panel: Panel, still: int, left: int, first: int) -> tuple[list[str], list[str]]:
    """The keyframes and the shapes of a panel. Keyframes are numbered from `first`."""
    styles: list[str] = []
    shapes = [f'<text class="t" x="{left}" y="{MARGIN + 14}">{escape(panel.title)}</text>']
    block_wide, top = panel.block_size * SLOT_WIDTH, MARGIN + HEADING - 8
    for start in range(0, len(panel.colours[0]), panel.block_size):
        row, column = divmod(start // panel.block_size, COLUMNS)
        x, y = left + column * (block_wide + GAP), top + row * (SLOT_HEIGHT + GAP)
        for i in range(panel.block_size):
            changes = [colours[start + i] for colours in panel.colours]
            animated = keyframes("fill", changes, first + len(styles), styles)
            at = f'x="{x + i * SLOT_WIDTH}" y="{y}" width="{SLOT_WIDTH}" height="{SLOT_HEIGHT}"'
            shapes.append(f'<rect {at} fill="{changes[still]}"{animated}/>')
        shapes.append(
            f'<rect x="{x - 0.5}" y="{y - 0.5}" width="{block_wide + 1}" height="{SLOT_HEIGHT + 1}" '
            f'fill="none" stroke="{LINE}"/>'
        )
    below = MARGIN + panel_height(panel) - 8
    for caption in dict.fromkeys(panel.captions):
        shown = ["1" if each == caption else "0" for each in panel.captions]
        animated = keyframes("opacity", shown, first + len(styles), styles)
        shapes.append(f'<text x="{left}" y="{below}" opacity="{shown[still]}"{animated}>{escape(caption)}</text>')
    return styles, shapes


def keyframes(name: str, values: Sequence[str], number: int, styles: list[str]) -> str:
    """Add a property's keyframes to `styles`; return the attributes of a shape that follows them, if it changes."""
    changes = list(runs(values))
    if len(changes) == 1:
        return ""
    frames = "".join(f"{100 * start / len(values):.4g}%{{{name}:{value}}}" for start, value in changes)
    styles.append(f"@keyframes k{number}{{{frames}}}")
    return f' class="a" style="animation-name:k{number}"'


def runs(values: Sequence[str]) -> Iterator[tuple[int, str]]:
    """Where each run of equal values starts.

    >>> list(runs(["a", "a", "b", "a"]))
    [(0, 'a'), (2, 'b'), (3, 'a')]
    """
    start = 0
    for value, run in groupby(values):
        yield start, value
        start += len(list(run))
