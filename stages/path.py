"""The seven stages in a line each, and the two tables that are made of them."""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from stages.chaintools import added_lines, load
from stages.tables import ROOT, Results, table


class Idea(NamedTuple):
    """A stage in a line, and what it leaves for the next."""

    name: str
    adds: str
    leaves_open: str


IDEAS = (
    Idea(
        "contiguous cache",
        "one pool; each sequence reserves its slots in one piece",
        "one reservation wastes inside, the other leaves holes outside: you cannot cure both",
    ),
    Idea("block manager", "blocks, block tables, a free list", "every step copies the whole history"),
    Idea("paged attention", "attention reads blocks where they lie", "the batch waits for its slowest member"),
    Idea(
        "continuous batching",
        "a scheduler: admission at every step, chunked prefill, preemption",
        "n samples of one prompt cost n prompts",
    ),
    Idea(
        "copy-on-write",
        "samples and beams that share blocks until they differ",
        "equal prompts in two requests are computed twice",
    ),
    Idea("prefix caching", "blocks found again by a hash of what they hold", "the cache ends with the device's memory"),
    Idea("CPU offload", "a second tier: swap blocks out and in", "one process, one machine"),
)


def linked(number: int, idea: Idea, start: Path) -> str:
    """A stage's name; a link, relative to `start`, if the stage is there."""
    stages = load(ROOT).stages
    if number > len(stages):
        return f"{number}, {idea.name}"
    lesson = stages[number - 1].folder / "README.md"
    return f"[{number}, {idea.name}]({lesson.relative_to(start)})"


def path_block(results: Results) -> str:
    """The stages as a path: what each adds, and the question that it leaves open."""
    start = ROOT / "stages"
    rows = [[linked(number, idea, start), idea.adds, idea.leaves_open] for number, idea in enumerate(IDEAS, start=1)]
    there = f"\nThere so far: {len(load(ROOT).stages)} of {len(IDEAS)}.\n"
    return table(["stage", "adds", "the question it leaves open"], rows) + there


def stages_block(results: Results) -> str:
    """The table of the chain: idea, lines in the diff, measured effect."""
    stages = load(ROOT).stages
    rows = []
    for number, idea in enumerate(IDEAS, start=1):
        there = number <= len(stages)
        lines = f"{added_lines(stages[number - 1]):,}" if there else "to come"
        effect = EFFECTS[stages[number - 1].key](results) if there else "to come"
        rows.append([linked(number, idea, ROOT), idea.adds, lines, effect])
    return table(["stage", "idea", "lines added", "measured effect"], rows)


def effect_s1(results: Results) -> str:
    """What the cache buys, and what it leaves empty, as shares of what is reserved."""
    gain = results["predict"]["s1"]["cache_at_990"]
    runs = [run for name, run in results["scoreboard"].items() if name.startswith("s1")]
    empty = [run["wasted_bytes"] / run["held_bytes"] for run in runs]
    return f"token 990 comes {gain:.0f} times sooner; {min(empty):.0%} to {max(empty):.0%} of what is reserved is empty"


EFFECTS: dict[str, Callable[[Results], str]] = {"s1": effect_s1}
