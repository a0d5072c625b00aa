"""The picture at the top of README.md: the page's eight requests, in one piece each and in blocks.

It is an animated SVG without a script, because an image in a README may move but not run code. Each slot of a pool is a
small rectangle whose fill changes in CSS keyframes. A viewer without CSS shows one step, and so does a browser that
passes the reader's preference for less motion to images. The colors follow the reader's light or dark theme.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, chain, groupby, repeat
from typing import NamedTuple
from xml.sax.saxutils import escape

from nanovllm.trace import State
from nanovllm.trace.events import Event
from nanovllm.trace.replay import SequenceState
from notebooks.page.record import BLOCK_SIZE, NUM_BLOCKS, ROOT, WORKLOAD, Run, Step

PICTURE = ROOT / "notebooks" / "pool.svg"
SECONDS_PER_STEP = 0.12
TITLES = {"s1": "Stage 1: one piece each", "s6": "Stage 6: shared blocks"}
COLUMNS, GAP, MARGIN, BETWEEN = 8, 5, 14, 36  # blocks per row; pixels between blocks, at the edges, between panels
SLOT_WIDTH, SLOT_HEIGHT = 4, 26
HEADING, CAPTION = 32, 23  # heights in pixels, of the title and of a line below the pool
COLORS = ("#4a7fb5", "#3b8f6e", "#a8842c", "#a65e9e", "#128c8c", "#7561b3", "#6a8f3f", "#b3616e")  # one per request
GROUND = ("#ffffff", "#0d1117")  # on a light and on a dark page


def mix(color: str, ground: str) -> str:
    """Return the pale form of a color: 3 parts of it in 7 parts of the ground.

    >>> mix("#000000", "#ffffff"), mix("#ffffff", "#000000")
    ('#b2b2b2', '#4c4c4c')
    """
    channels = ((int(color[i : i + 2], 16), int(ground[i : i + 2], 16)) for i in (1, 3, 5))
    return "#" + "".join(f"{int(a * 0.3 + b * 0.7):02x}" for a, b in channels)


THEMES = {  # the colors of everything, by the names that CSS gives them
    "ground": GROUND,
    "free": GROUND,
    "idle": ("#d0d7de", "#3d444d"),
    "line": ("#d0d7de", "#3d444d"),
    "shared": ("#24292f", "#f0f6fc"),
    "title": ("#24292f", "#f0f6fc"),
    "text": ("#57606a", "#9198a1"),
    **{f"used{i}": (color, color) for i, color in enumerate(COLORS)},
    **{f"kept{i}": (mix(color, GROUND[0]), mix(color, GROUND[1])) for i, color in enumerate(COLORS)},
}


class Panel(NamedTuple):
    """A pool over time, by the names of THEMES: fills[t][i] is slot i at step t, outlines[t][b] is block b.

    lines[t] are the lines below the pool.
    """

    title: str
    block_size: int
    fills: Sequence[Sequence[str]]
    outlines: Sequence[Sequence[str]]
    lines: Sequence[Sequence[str]]


# ---- the two runs


def picture(recorded: dict[str, list[Event]]) -> str:
    """Return both runs, step by step. The shorter one stays at its end until the longer one has ended."""
    runs = {name: Run(recorded[name]) for name in TITLES}
    num_steps = max(len(run.steps) for run in runs.values())
    one, other = [panel(TITLES[name], run, num_steps) for name, run in runs.items()]
    panels, still = [one, other], most_different_step(one, other)
    captions = [f"{each.title}: {', '.join(each.lines[still])}" for each in panels]
    start = f"Eight requests in a pool of {NUM_BLOCKS} blocks of {BLOCK_SIZE}, after {still + 1} steps"
    label = ". ".join([start, *captions])
    return animate(panels, still, seconds=num_steps * SECONDS_PER_STEP, label=label)


def panel(title: str, run: Run, num_steps: int) -> Panel:
    fills = [slot_fills(step.after) for step in run.steps]
    lines = [(queues(step.after), *rest) for step, rest in zip(run.steps, memory(run.steps), strict=True)]
    lines[-1] = (f"all done after {len(run.steps)} steps", *lines[-1][1:])
    columns = (fills, [block_outlines(step.after) for step in run.steps], lines)
    missing = num_steps - len(run.steps)
    return Panel(title, BLOCK_SIZE, *([*chain(each, repeat(each[-1], missing))] for each in columns))


def queues(state: State) -> str:
    """Return how many requests run and wait. One with several samples runs as long as one of them does."""
    running, waiting = ({seq.partition(".")[0] for seq in queue} for queue in (state.running, state.waiting))
    return f"{len(running)} running, {len(waiting - running)} waiting"


def memory(steps: Iterable[Step]) -> Iterator[tuple[str]]:
    """Yield what the memory looks like after each step: its holes, or what has happened to its blocks so far."""
    copied = evicted = 0
    for step in steps:
        copied, evicted = copied + len(step.of("copied")), evicted + len(step.of("evicted"))
        if step.after.ref_counts:
            num_shared = sum(count > 1 for count in step.after.ref_counts)
            yield (f"{num_shared} shared, {copied} copied, {evicted} evicted",)
        else:
            holes = free_pieces(step.after)
            yield (f"{sum(holes)} slots free, {max(holes)} in one piece",)


def free_pieces(state: State) -> list[int]:
    """Return the lengths of the free pieces of a pool without blocks."""
    held = sorted(seq.slots for seq in state.sequences.values() if seq.slots)
    edges = [0, *chain.from_iterable(held), NUM_BLOCKS * BLOCK_SIZE]
    return [end - start for start, end in zip(edges[::2], edges[1::2], strict=True)]


def slot_fills(state: State) -> list[str]:
    """Return the fill of each slot: used if it holds a token's keys and values, kept if it is only reserved."""
    fills = ["free"] * (NUM_BLOCKS * BLOCK_SIZE)
    for block in state.idle:
        fills[block * BLOCK_SIZE : (block + 1) * BLOCK_SIZE] = ["idle"] * BLOCK_SIZE
    names = [request.name for request in WORKLOAD]
    for seq in state.sequences.values():
        number = names.index(seq.request.split(".")[0])
        for place, slot in enumerate(held_slots(seq)):
            if place < seq.num_computed_tokens:
                fills[slot] = f"used{number}"
            elif not fills[slot].startswith("used"):
                fills[slot] = f"kept{number}"
    return fills


def block_outlines(state: State) -> list[str]:
    """Return the outline of each block, which shows whether several sequences hold it."""
    return ["shared" if count > 1 else "line" for count in state.ref_counts or [0] * NUM_BLOCKS]


def held_slots(seq: SequenceState) -> list[int]:
    """Return the slots that a sequence holds, in the order of its tokens."""
    if seq.slots:
        return list(range(*seq.slots))
    return [block * BLOCK_SIZE + i for block in seq.block_table if block is not None for i in range(BLOCK_SIZE)]


def most_different_step(one: Panel, other: Panel) -> int:
    """Return the step at which the second panel has the most slots in use beyond the first, which isn't empty."""

    def in_use(panel: Panel) -> list[int]:
        return [sum(fill.startswith("used") for fill in fills) for fills in panel.fills]

    gains = [b - a if a else 0 for a, b in zip(in_use(one), in_use(other), strict=True)]
    return gains.index(max(gains))


# ---- the SVG


def animate(panels: Sequence[Panel], still: int, seconds: float, label: str) -> str:
    """Return the panels as one SVG. They must have the same number of steps; `still` is the step without motion."""
    widths = [panel_width(panel) for panel in panels]
    lefts = accumulate(widths[:-1], lambda left, width: left + width + BETWEEN, initial=MARGIN)
    styles: dict[str, str] = {}
    shapes = [shape for panel, left in zip(panels, lefts, strict=True) for shape in draw(panel, still, left, styles)]
    width = sum(widths) + BETWEEN * (len(panels) - 1) + 2 * MARGIN
    height = max(panel_height(panel) for panel in panels) + 2 * MARGIN
    light, dark = [";".join(f"--{name}:{colors[i]}" for name, colors in THEMES.items()) for i in (0, 1)]
    return "\n".join([
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" role="img">',
        f"<title>{escape(label)}</title>",
        f"<style>svg{{{light}}}",
        f"@media(prefers-color-scheme:dark){{svg{{{dark}}}}}",
        "text{font:17px system-ui,sans-serif}.title{font-weight:600}rect{shape-rendering:crispEdges}",
        *[f".{name}{{fill:var(--{name})}}" for name in THEMES if name not in ("line", "shared")],
        *[f".{name}{{stroke:var(--{name});stroke-width:1.5}}" for name in ("line", "shared")],
        f".a{{animation:{seconds:g}s step-end infinite}}",
        *[f"@keyframes {name}{{{frames}}}" for frames, name in styles.items()],
        "@media(prefers-reduced-motion:reduce){.a{animation:none}}</style>",
        f'<rect width="{width}" height="{height}" rx="6" class="ground" fill="{GROUND[0]}"/>',
        *shapes,
        "</svg>\n",
    ])  # fmt: skip


def panel_width(panel: Panel) -> int:
    return COLUMNS * (panel.block_size * SLOT_WIDTH + GAP) - GAP


def panel_height(panel: Panel) -> int:
    num_rows = -(-len(panel.outlines[0]) // COLUMNS)
    return HEADING + num_rows * (SLOT_HEIGHT + GAP) + len(panel.lines[0]) * CAPTION


def draw(panel: Panel, still: int, left: int, styles: dict[str, str]) -> Iterator[str]:
    """Yield the shapes of a panel, and add their keyframes to `styles`."""
    yield f'<text class="title" x="{left}" y="{MARGIN + 16}">{escape(panel.title)}</text>'
    size, top = panel.block_size, MARGIN + HEADING
    for block, outlines in enumerate(zip(*panel.outlines, strict=True)):
        row, column = divmod(block, COLUMNS)
        x, y = left + column * (size * SLOT_WIDTH + GAP), top + row * (SLOT_HEIGHT + GAP)
        for i in range(size):
            fills = [fills[block * size + i] for fills in panel.fills]
            at = f'x="{x + i * SLOT_WIDTH}" y="{y}" width="{SLOT_WIDTH}" height="{SLOT_HEIGHT}"'
            animated = animation("fill", [f"var(--{fill})" for fill in fills], styles)
            yield f'<rect {at} fill="{THEMES[fills[still]][0]}" class="{fills[still]}{animated}/>'
        at = f'x="{x - 0.5}" y="{y - 0.5}" width="{size * SLOT_WIDTH + 1}" height="{SLOT_HEIGHT + 1}"'
        animated = animation("stroke", [f"var(--{outline})" for outline in outlines], styles)
        color = THEMES[outlines[still]][0]
        yield f'<rect {at} fill="none" stroke="{color}" class="{outlines[still]}{animated}/>'
    for number, lines in enumerate(zip(*panel.lines, strict=True), start=1):
        y = MARGIN + panel_height(panel) - (len(panel.lines[0]) - number) * CAPTION - 2
        for line in dict.fromkeys(lines):
            shown = ["1" if each == line else "0" for each in lines]
            animated = animation("opacity", shown, styles)
            yield f'<text x="{left}" y="{y}" opacity="{shown[still]}" class="text{animated}>{escape(line)}</text>'


def animation(name: str, values: Sequence[str], styles: dict[str, str]) -> str:
    """Return the end of a class attribute, and the style of a shape whose property `name` has these values over time.

    Equal keyframes are in `styles` once.
    """
    changes = list(runs(values))
    if len(changes) == 1:
        return '"'
    frames = "".join(f"{100 * start / len(values):.4g}%{{{name}:{value}}}" for start, value in changes)
    number = styles.setdefault(frames, f"k{len(styles)}")
    return f' a" style="animation-name:{number}"'


def runs(values: Sequence[str]) -> Iterator[tuple[int, str]]:
    """Yield the start and the value of each run of equal values.

    >>> list(runs(["a", "a", "b", "a"]))
    [(0, 'a'), (2, 'b'), (3, 'a')]
    """
    start = 0
    for value, run in groupby(values):
        yield start, value
        start += len(list(run))
