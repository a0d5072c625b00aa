"""The picture at the top of README.md: the same eight requests in one piece each and in blocks, from the page's runs."""

from typing import Any

from nanovllm.trace import State
from notebooks.page.animation import Panel, animate
from notebooks.page.record import Event, Run
from notebooks.page.workload import BLOCK_SIZE, NUM_BLOCKS, ROOT, WORKLOAD

PICTURE = ROOT / "notebooks" / "pool.svg"
SECONDS_A_STEP = 0.12
FREE, IDLE = "#ffffff", "#d8dee4"
COLOURS = ("#4a7fb5", "#3b8f6e", "#a8842c", "#a65e9e", "#128c8c", "#7561b3", "#6a8f3f", "#b3616e")  # of A to H
TITLES = {"s1": "stage 1: each request in one piece", "s6": "stage 6: blocks, shared where texts begin alike"}


def picture(recorded: dict[str, list[Event]]) -> str:
    """Both runs step by step; the shorter one stays at its end until the longer one has ended."""
    runs = {name: Run(recorded[name]) for name in TITLES}
    num_steps = max(len(run.steps) for run in runs.values())
    panels = [panel(name, runs[name], num_steps) for name in TITLES]
    still = fullest(runs["s6"])
    label = "Eight requests in a pool of 40 blocks of 8 slots: " + "; ".join(
        f"{TITLES[name]}, {each.captions[still]} after {still + 1} steps" for name, each in zip(TITLES, panels, strict=True)
    )
    return animate(panels, still, seconds=num_steps * SECONDS_A_STEP, label=label)


def panel(name: str, run: Run, num_steps: int) -> Panel:
    states = [step.after for step in run.steps]
    colours = [slots(state) for state in states]
    captions, done = [], set[str]()
    for step in run.steps:
        done |= {event["seq"] for event in step.of("end")}
        captions.append(caption(step.after, done, f"all done at step {step.number}"))
    missing = num_steps - len(states)
    return Panel(TITLES[name], BLOCK_SIZE, colours + colours[-1:] * missing, captions + captions[-1:] * missing)


def caption(state: State, done: set[str], at_end: str) -> str:
    if not state.sequences and len({seq.split(".")[0] for seq in done}) == len(WORKLOAD):
        return at_end
    used = sum(colour in COLOURS for colour in slots(state))
    return f"{len(state.running)} running, {len(state.waiting)} waiting"


def slots(state: State) -> list[str]:
    """The colour of each slot of the pool: full where a token's keys and values are, pale where the slot is only held."""
    colours = [FREE] * (NUM_BLOCKS * BLOCK_SIZE)
    for block in state.idle:
        colours[block * BLOCK_SIZE : (block + 1) * BLOCK_SIZE] = [IDLE] * BLOCK_SIZE
    for seq in state.sequences.values():
        colour = COLOURS["ABCDEFGH".index(seq.request[0])]
        for place, slot in enumerate(held(seq)):
            full = place < seq.num_computed_tokens
            if full or colours[slot] not in COLOURS:
                colours[slot] = colour if full else pale(colour)
    return colours


def held(seq: Any) -> list[int]:
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


def fullest(run: Run) -> int:
    """The step at which most slots are computed."""
    used = [sum(colour in COLOURS for colour in slots(step.after)) for step in run.steps]
    return used.index(max(used))
