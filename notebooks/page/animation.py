"""The picture at the top of README.md: the page's eight requests, in one piece each and in blocks.

It is an animated SVG without a script, because an image in a README may move but not run code. Each slot of a pool is a
small rectangle whose fill changes in CSS keyframes. A reader who prefers no motion sees one step, and so does a viewer
without CSS.
"""

from collections.abc import Iterator, Sequence
from itertools import chain, groupby, repeat
from typing import NamedTuple
from xml.sax.saxutils import escape

from nanovllm.trace import State
from nanovllm.trace.events import Event
from nanovllm.trace.replay import SequenceState
from notebooks.page.record import (
    BLOCK_SIZE,
    MAX_NUM_BATCHED_TOKENS,
    MAX_NUM_SEQS,
    NUM_BLOCKS,
    ROOT,
    WORKLOAD,
    Run,
    Step,
)

PICTURE = ROOT / "notebooks" / "pool.svg"
SECONDS_PER_STEP = 0.12
FREE, IDLE = "#ffffff", "#d8dee4"
COLORS = ("#4a7fb5", "#3b8f6e", "#a8842c", "#a65e9e", "#128c8c", "#7561b3", "#6a8f3f", "#b3616e")  # one per request
TITLES = {"s1": "stage 1: each request in one piece", "s6": "stage 6: blocks, shared by common prefixes"}
COLUMNS, GAP, MARGIN = 10, 5, 16  # blocks per row, pixels, pixels
SLOT_WIDTH, SLOT_HEIGHT = 4, 26
HEADING, CAPTION = 30, 22  # heights in pixels
LIMITS = {  # reasons to wait beside free blocks, from stage 4 on
    "budget": f"a step computes at most {MAX_NUM_BATCHED_TOKENS} tokens",
    "seat": f"all {MAX_NUM_SEQS} seats are taken",
}
INK, QUIET, GROUND, LINE = "#24292f", "#57606a", "#ffffff", "#d0d7de"


class Panel(NamedTuple):
    """A pool over time: colors[t][i] is the color of slot i at step t, captions[t] the line below the pool."""

    title: str
    block_size: int
    colors: Sequence[Sequence[str]]
    captions: Sequence[str]


# ---- the two runs


def picture(recorded: dict[str, list[Event]]) -> str:
    """Return both runs, step by step. The shorter one stays at its end until the longer one has ended."""
    runs = {name: Run(recorded[name]) for name in TITLES}
    num_steps = max(len(run.steps) for run in runs.values())
    one, other = [panel(TITLES[name], run, num_steps) for name, run in runs.items()]
    panels, still = [one, other], most_different_step(one, other)
    captions = [f"{each.title}: {each.captions[still]}" for each in panels]
    start = f"Eight requests in a pool of {NUM_BLOCKS} blocks of {BLOCK_SIZE}, after {still + 1} steps"
    label = ". ".join([start, *captions])
    return animate(panels, still, seconds=num_steps * SECONDS_PER_STEP, label=label)


def panel(title: str, run: Run, num_steps: int) -> Panel:
    colors = [slot_colors(step.after) for step in run.steps]
    captions = [caption(step, slots) for step, slots in zip(run.steps, colors, strict=True)]
    captions[-1] = f"all done after {len(run.steps)} steps"
    missing = num_steps - len(run.steps)
    return Panel(
        title,
        BLOCK_SIZE,
        [*chain(colors, repeat(colors[-1], missing))],
        [*chain(captions, repeat(captions[-1], missing))],
    )


def caption(step: Step, slots: list[str]) -> str:
    """Return the caption. It counts tenths of the pool, because a number that changes at each step is unreadable.

    It counts requests: one with several samples runs as long as one of them does.
    """
    running, waiting = ({seq.partition(".")[0] for seq in queue} for queue in (step.after.running, step.after.waiting))
    queues = f"{len(running)} running, {len(waiting - running)} waiting"
    for event in step.of("held_up"):
        if event["why"] in LIMITS:
            return f"{queues}: {LIMITS[event['why']]}"
    tenths = 10 * round(10 * sum(color in COLORS for color in slots) / len(slots))
    return f"{queues}; {tenths}% of the pool in use"


def slot_colors(state: State) -> list[str]:
    """Return the color of each slot: full if it holds a token's keys and values, pale if it is only reserved."""
    colors = [FREE] * (NUM_BLOCKS * BLOCK_SIZE)
    for block in state.idle:
        colors[block * BLOCK_SIZE : (block + 1) * BLOCK_SIZE] = [IDLE] * BLOCK_SIZE
    names = [request.name for request in WORKLOAD]
    for seq in state.sequences.values():
        color = COLORS[names.index(seq.request.split(".")[0])]
        for place, slot in enumerate(held_slots(seq)):
            if place < seq.num_computed_tokens:
                colors[slot] = color
            elif colors[slot] not in COLORS:
                colors[slot] = pale(color)
    return colors


def held_slots(seq: SequenceState) -> list[int]:
    """Return the slots that a sequence holds, in the order of its tokens."""
    if seq.slots:
        return list(range(*seq.slots))
    return [block * BLOCK_SIZE + i for block in seq.block_table if block is not None for i in range(BLOCK_SIZE)]


def pale(color: str) -> str:
    """Mix a color with white.

    >>> pale("#000000")
    '#b2b2b2'
    """
    return "#" + "".join(f"{int(int(color[i : i + 2], 16) * 0.3 + 255 * 0.7):02x}" for i in (1, 3, 5))


def most_different_step(one: Panel, other: Panel) -> int:
    """Return the step at which the second panel has the most slots in use beyond the first."""

    def in_use(panel: Panel) -> list[int]:
        return [sum(color in COLORS for color in colors) for colors in panel.colors]

    gains = [b - a for a, b in zip(in_use(one), in_use(other), strict=True)]
    return gains.index(max(gains))


# ---- the SVG


def animate(panels: Sequence[Panel], still: int, seconds: float, label: str) -> str:
    """Return the panels as one SVG. They must have the same number of steps; `still` is the step without motion."""
    widths = [panel_width(panel) for panel in panels]
    height = max(panel_height(panel) for panel in panels) + 2 * MARGIN
    width = sum(widths) + MARGIN * 3 * (len(panels) - 1) + 2 * MARGIN
    styles: list[str] = []
    shapes: list[str] = []
    left = MARGIN
    for panel, panel_wide in zip(panels, widths, strict=True):
        rules, panel_shapes = draw(panel, still, left, len(styles))
        styles += rules
        shapes += panel_shapes
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
    num_rows = -(-len(panel.colors[0]) // (COLUMNS * panel.block_size))
    return HEADING + num_rows * (SLOT_HEIGHT + GAP) + CAPTION


def draw(panel: Panel, still: int, left: int, first: int) -> tuple[list[str], list[str]]:
    """Return the keyframes and the shapes of a panel. Keyframes are numbered from `first`."""
    styles: list[str] = []
    shapes = [f'<text class="t" x="{left}" y="{MARGIN + 14}">{escape(panel.title)}</text>']
    block_wide, top = panel.block_size * SLOT_WIDTH, MARGIN + HEADING - 8
    for start in range(0, len(panel.colors[0]), panel.block_size):
        row, column = divmod(start // panel.block_size, COLUMNS)
        x, y = left + column * (block_wide + GAP), top + row * (SLOT_HEIGHT + GAP)
        for i in range(panel.block_size):
            changes = [colors[start + i] for colors in panel.colors]
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
    """Add a property's keyframes to `styles`. Return the attributes of a shape that follows them."""
    changes = list(runs(values))
    if len(changes) == 1:
        return ""
    frames = "".join(f"{100 * start / len(values):.4g}%{{{name}:{value}}}" for start, value in changes)
    styles.append(f"@keyframes k{number}{{{frames}}}")
    return f' class="a" style="animation-name:k{number}"'


def runs(values: Sequence[str]) -> Iterator[tuple[int, str]]:
    """Yield the start and the value of each run of equal values.

    >>> list(runs(["a", "a", "b", "a"]))
    [(0, 'a'), (2, 'b'), (3, 'a')]
    """
    start = 0
    for value, run in groupby(values):
        yield start, value
        start += len(list(run))
