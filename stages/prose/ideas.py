"""The seven stages in a line each, and the two tables that are made of them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from stages.chaintools import Stage, added_lines, load
from stages.prose.markdown import table

ROOT = Path(__file__).resolve().parents[2]
Results = dict[str, Any]  # what stages/bench/results.json holds


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
    Idea("block manager", "blocks, block tables, a queue of the free blocks", "every step copies the whole history"),
    Idea(
        "paged attention",
        "attention reads blocks a tile at a time, all sequences at once",
        "the batch waits for its slowest member",
    ),
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
    Idea(
        "CPU offload",
        "a second tier: evicted blocks go to the host, and come back when they are hit",
        "one process, one machine",
    ),
)


def lessons() -> tuple[Stage, ...]:
    """The stages; the finished package is a link of the chain, and no lesson."""
    return tuple(stage for stage in load(ROOT).stages if stage.path.startswith("stages/"))


def linked(number: int, stage: Stage, idea: Idea, start: Path) -> str:
    """A stage's name, a link to its lesson relative to `start`."""
    return f"[{number}, {idea.name}]({(stage.folder / 'README.md').relative_to(start)})"


def path_block(results: Results) -> str:
    """The stages as a path: what each adds, and the question that it leaves open."""
    rows = [
        [linked(number, stage, idea, ROOT / "stages"), idea.adds, idea.leaves_open]
        for number, (stage, idea) in enumerate(zip(lessons(), IDEAS, strict=True), start=1)
    ]
    return table(["stage", "adds", "the question it leaves open"], rows)


def stages_block(results: Results) -> str:
    """The table of the chain: idea, lines in the diff, measured effect."""
    rows = [
        [linked(number, stage, idea, ROOT), idea.adds, f"{added_lines(stage):,}", EFFECTS[stage.key](results)]
        for number, (stage, idea) in enumerate(zip(lessons(), IDEAS, strict=True), start=1)
    ]
    return table(["stage", "idea", "lines added", "measured effect"], rows)


def effect_s1(results: Results) -> str:
    """What the cache buys, and what it leaves empty, as shares of what is reserved."""
    gain = results["predict"]["s1"]["cache_at_990"]
    empty = empty_shares(results, "s1")
    return f"token 990 comes {gain:.0f} times sooner; {min(empty):.0%} to {max(empty):.0%} of what is reserved is empty"


def effect_s2(results: Results) -> str:
    """What blocks leave empty, and what gathering them costs a step."""
    (empty,), cost = empty_shares(results, "s2"), results["predict"]["s2"]["gather"]
    slower = f"a step at {cost['longest']} tokens takes {cost['at_longest']:.1f} times as long"
    return f"{empty:.0%} of what is held is empty, and there are no holes; {slower}"


def effect_s3(results: Results) -> str:
    """What a batch gains, and what attention needs besides the pool."""
    gain = results["decode"]["cases"]["storyteller_float32_32_128"]["s3_over_s2"]
    before, now = (results["predict"]["s3"]["extra_bytes"][stage]["65536"] / 1e6 for stage in ("s2", "s3"))
    memory = f"at 65,536 tokens attention needs {now:.1f} MB beside the pool in place of {before:.1f}"
    return f"{memory}; 32 sequences decode {gain:.1f} times as fast"


def effect_s4(results: Results) -> str:
    """What joining at once saves, and what it gives where memory is short."""
    steps, serving = results["predict"]["s4"]["steps"], results["serving"]
    fewer = f"8 seats take {steps['continuous']:,} steps in place of {steps['static']:,}"
    return f"{fewer}; from a small pool {serving['s4_over_s3']['ratio']:.1f} times the tokens a second of stage 3"


def effect_s5(results: Results) -> str:
    """What sharing saves, and what it costs those who do not share."""
    answers, speed = results["predict"]["s5"], results["overhead"]["s5_over_s4"]["ratio"]
    shared, alone, requests = (answers["of_200"][name]["blocks"] for name in ("samples", "alone", "requests"))
    fewer = f"8 samples of 200 tokens and 64 more hold {shared:,} blocks in place of {requests:,} (one holds {alone})"
    return f"{fewer}; where nobody forks {speed:.2f} times the tokens a second of stage 4"


def effect_s6(results: Results) -> str:
    """What a shared prefix saves, and what looking for one costs where there is none."""
    shared, speed = results["prefix_cache"]["shared"], results["overhead"]["s6_over_s5"]["ratio"]
    sooner = f"after a cached prefix of 512 tokens the first token comes {shared['times_shorter']:.0f} times sooner"
    return f"{sooner}; where nobody shares {speed:.2f} times the tokens a second of stage 5"


def effect_s7(results: Results) -> str:
    """What a second tier finds again in a third of the memory, and what that is worth."""
    if "offload" not in results:
        return "not measured yet"
    pools, first = results["offload"]["pools"], results["offload"]["first_token"]["512"]
    twice = [f"{pools[name]['computed_twice']:,.0f}" for name in ("load", "s6")]
    saved = f"in a third of the memory {twice[0]} tokens are computed twice in place of {twice[1]}"
    return f"{saved}; a prefix of 512 on the host comes {first['ratio']:.0f} times sooner than computed"


def empty_shares(results: Results, stage: str) -> list[float]:
    """Wasted over held, for each run of a stage on the scoreboard."""
    runs = [run for name, run in results["scoreboard"].items() if name.startswith(f"{stage},")]
    return [run["wasted_bytes"] / run["held_bytes"] for run in runs]


EFFECTS: dict[str, Callable[[Results], str]] = {
    "s1": effect_s1,
    "s2": effect_s2,
    "s3": effect_s3,
    "s4": effect_s4,
    "s5": effect_s5,
    "s6": effect_s6,
    "s7": effect_s7,
}


BLOCKS: dict[str, Callable[[Results], str]] = {"stages": stages_block, "path": path_block}
