"""The picture at the top of README.md: the page's eight requests in one piece each, and in blocks."""

from itertools import chain, repeat

from nanovllm.trace import State
from nanovllm.trace.replay import SequenceState
from notebooks.page.animation import Panel, animate
from notebooks.page.record import Event, Run
from notebooks.page.workload import BLOCK_SIZE, NUM_BLOCKS, ROOT, WORKLOAD

PICTURE = ROOT / "notebooks" / "pool.svg"
SECONDS_A_STEP = 0.12
FREE, IDLE = "#ffffff", "#d8dee4"
COLOURS = ("#4a7fb5", "#3b8f6e", "#a8842c", "#a65e9e", "#128c8c", "#7561b3", "#6a8f3f", "#b3616e")  # of the requests
TITLES = {"s1": "stage 1: each request in one piece", "s6": "stage 6: blocks, shared where texts begin alike"}


def picture(recorded: dict[str, list[Event]]) -> str:
    """Both runs step by step. The shorter one stays at its end until the longer one has ended."""
    runs = {name: Run(recorded[name]) for name in TITLES}
    num_steps = max(len(run.steps) for run in runs.values())
    panels = [panel(TITLES[name], run, num_steps) for name, run in runs.items()]
    still = where_they_differ_most(*panels)
    told = [f"{each.title}: {each.captions[still]}" for each in panels]
    start = f"Eight requests in a pool of {NUM_BLOCKS} blocks of {BLOCK_SIZE}, after {still + 1} steps"
    label = ". ".join([start, *told])
    return animate(panels, still, seconds=num_steps * SECONDS_A_STEP, label=label)


def panel(title: str, run: Run, num_steps: int) -> Panel:
    colours = [slots(step.after) for step in run.steps]
    captions = [caption(step.after, shown) for step, shown in zip(run.steps, colours, strict=True)]
    captions[-1] = f"all done after {len(run.steps)} steps"
    missing = num_steps - len(run.steps)
    return Panel(
        title,
        BLOCK_SIZE,
        [*chain(colours, repeat(colours[-1], missing))],
        [*chain(captions, repeat(captions[-1], missing))],
    )


def caption(state: State, shown: list[str]) -> str:
    """In tenths of the pool: a number that changes at each step cannot be read."""
    tenths = 10 * round(10 * sum(colour in COLOURS for colour in shown) / len(shown))
    return f"{len(state.running)} running, {len(state.waiting)} waiting; {tenths}% of the pool in use"


def slots(state: State) -> list[str]:
    """The colour of each slot: full where a token's keys and values are, pale where the slot is only held."""
    colours = [FREE] * (NUM_BLOCKS * BLOCK_SIZE)
    for block in state.idle:
        colours[block * BLOCK_SIZE : (block + 1) * BLOCK_SIZE] = [IDLE] * BLOCK_SIZE
    names = [request.name for request in WORKLOAD]
    for seq in state.sequences.values():
        colour = COLOURS[names.index(seq.request.split(".")[0])]
        for place, slot in enumerate(held(seq)):
            if place < seq.num_computed_tokens:
                colours[slot] = colour
            elif colours[slot] not in COLOURS:
                colours[slot] = pale(colour)
    return colours


def held(seq: SequenceState) -> list[int]:
    """The slots that a sequence holds, in the order of its tokens."""
    if seq.slots:
        return list(range(*seq.slots))
    return [block * BLOCK_SIZE + i for block in seq.block_table for i in range(BLOCK_SIZE)]


def pale(colour: str) -> str:
    """
    >>> pale("#000000")
    '#b2b2b2'
    """
    return "#" + "".join(f"{int(int(colour[i : i + 2], 16) * 0.3 + 255 * 0.7):02x}" for i in (1, 3, 5))


def where_they_differ_most(one: Panel, other: Panel) -> int:
    """The step at which the second has most slots in use beyond the first."""

    def in_use(panel: Panel) -> list[int]:
        return [sum(colour in COLOURS for colour in colours) for colours in panel.colours]

    gains = [b - a for a, b in zip(in_use(one), in_use(other), strict=True)]
    return gains.index(max(gains))
