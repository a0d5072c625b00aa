"""The seven stages in a line each, and the two tables made of them."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from stages.tools.chain import Stage, added_lines, load
from stages.tools.prose.markdown import look_up, table

ROOT = Path(__file__).resolve().parents[3]
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
    Idea("block manager", "blocks, block tables, a stack of free blocks", "every step copies the whole history"),
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
    """Return the stages that have a lesson."""
    return tuple(stage for stage in load(ROOT).stages if stage.path.startswith("stages/"))


def linked(number: int, stage: Stage, idea: Idea, start: Path) -> str:
    """Return a stage's name as a link to its lesson, relative to `start`."""
    return f"[{number}, {idea.name}]({(stage.folder / 'README.md').relative_to(start)})"


def path_block(results: Results) -> str:
    """Return the stages as a path: what each adds, and the question that it leaves open."""
    rows = [
        [linked(number, stage, idea, ROOT / "stages"), idea.adds, idea.leaves_open]
        for number, (stage, idea) in enumerate(zip(lessons(), IDEAS, strict=True), start=1)
    ]
    return table(["stage", "adds", "the question it leaves open"], rows)


def stages_block(results: Results) -> str:
    """Return the table of the chain: idea, lines in the diff, measured effect."""
    rows = [
        [linked(number, stage, idea, ROOT), idea.adds, f"{added_lines(stage):,}", effect(stage.key, results)]
        for number, (stage, idea) in enumerate(zip(lessons(), IDEAS, strict=True), start=1)
    ]
    return table(["stage", "idea", "lines added", "measured effect"], rows)


EFFECTS = {  # {a key of results.json, or of derived():its format}
    "s1": "token 990 comes {predict.s1.cache_at_990:.0f} times sooner; {derived.s1_least_empty:.0%} to "
    "{derived.s1_most_empty:.0%} of what is reserved is empty",
    "s2": "{derived.s2_empty:.0%} of what is held is empty, and there are no holes; a step at "
    "{predict.s2.gather.longest:,} tokens takes {predict.s2.gather.at_longest:.2f} times as long",
    "s3": "at 65,536 tokens attention needs {derived.s3_megabytes:.1f} MB beside the pool in place of "
    "{derived.s2_megabytes:.1f}; 32 sequences decode "
    "{decode.cases.storyteller_float32_32_128.s3_over_s2:.2f} times as fast",
    "s4": "8 seats take {predict.s4.steps.continuous:,} steps in place of {predict.s4.steps.static:,}; from a small "
    "pool {serving.s4_over_s3.ratio:.2f} times the tokens a second of stage 3",
    "s5": "8 samples of 200 tokens and 64 more hold {predict.s5.of_200.samples.blocks:,} blocks in place of "
    "{predict.s5.of_200.requests.blocks:,} (one holds {predict.s5.of_200.alone.blocks:,}); where nobody forks "
    "{overhead.s5_over_s4.ratio:.2f} times the tokens a second of stage 4",
    "s6": "after a cached prefix of 512 tokens the first token comes {prefix_cache.shared.times_shorter:.1f} times "
    "sooner; where nobody shares {overhead.s6_over_s5.ratio:.2f} times the tokens a second of stage 5",
    "s7": "in a third of the memory {predict.s7.cut.load.computed_twice:,} tokens are computed twice in place of "
    "{predict.s7.cut.s6.computed_twice:,}; a prefix of 512 on the host comes {offload.first_token.512.ratio:.0f} times "
    "sooner than computed",
}


def effect(stage: str, results: Results) -> str:
    """Return the effect of a stage, each number in a mark that names its key."""
    known = results | {"derived": derived(results)}

    def mark(match: re.Match[str]) -> str:
        key, form = match.groups()
        return f"<!-- n: {key}:{form} -->{look_up(known, key):{form}}<!-- / -->"

    return re.sub(r"\{([\w.]+):([^}]+)\}", mark, EFFECTS[stage])


def derived(results: Results) -> dict[str, float]:
    """Return the numbers that are computed from several figures."""
    one, two = (empty_shares(results, stage) for stage in ("s1", "s2"))
    beside = results["predict"]["s3"]["extra_bytes"]
    return {
        "s1_least_empty": min(one),
        "s1_most_empty": max(one),
        "s2_empty": two[0],
        **{f"{stage}_megabytes": beside[stage]["65536"] / 1e6 for stage in ("s2", "s3")},
    }


def empty_shares(results: Results, stage: str) -> list[float]:
    """Return wasted bytes over held bytes, for each run of a stage on the scoreboard."""
    runs = [run for name, run in results["scoreboard"].items() if name.startswith(f"{stage},")]
    return [run["wasted_bytes"] / run["held_bytes"] for run in runs]


BLOCKS: dict[str, Callable[[Results], str]] = {"stages": stages_block, "path": path_block}
