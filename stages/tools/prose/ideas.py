"""One line about each of the seven stages and of the files of an evening, and the tables made from them."""

import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from stages.tools.chain import Stage, added_lines, load
from stages.tools.chain.lines import code_lines
from stages.tools.museum import Fault, address, faults
from stages.tools.prose.markdown import table

ROOT = Path(__file__).resolve().parents[3]
Results = dict[str, Any]  # what stages/bench/results.json holds


class Idea(NamedTuple):
    """A stage in one line, its purpose, and the problem that it leaves for the next."""

    name: str
    adds: str
    gains: str
    leaves_open: str


IDEAS = (
    Idea(
        "contiguous cache",
        "one pool; each sequence reserves its slots in one piece",
        "keys and values are computed once",
        "large reservations waste slots, and small ones leave holes between them",
    ),
    Idea(
        "block manager",
        "blocks, block tables, a stack of free blocks",
        "no holes: any free block serves any sequence",
        "every step copies the whole history",
    ),
    Idea(
        "paged attention",
        "softmax in parts: attention reads blocks a tile at a time, all sequences at once",
        "one set of operations for the whole batch, in bounded memory",
        "a tile is still copied; and the batch waits for its slowest member",
    ),
    Idea(
        "continuous batching",
        "who runs is chosen at every step; that needs admission, chunked prefill, preemption",
        "requests join and leave at every step",
        "n samples of one prompt cost n prompts",
    ),
    Idea(
        "copy-on-write",
        "samples that share blocks until they differ",
        "n samples share one prompt",
        "equal prompts in two requests are computed twice",
    ),
    Idea(
        "prefix caching",
        "blocks that are reused by a hash of their contents",
        "a shared prefix is computed once",
        "the cache can't outgrow the device's memory",
    ),
    Idea(
        "CPU offload",
        "a second tier behind the same hashes: evicted blocks go to the host, and return on a hit",
        "a cache larger than the device's memory",
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
    """Return the table of the chain: idea, purpose, lines in the diff."""
    rows = [
        [linked(number, stage, idea, ROOT), idea.adds, idea.gains, f"{added_lines(stage):,}"]
        for number, (stage, idea) in enumerate(zip(lessons(), IDEAS, strict=True), start=1)
    ]
    return table(["stage", "idea", "benefit", "lines added"], rows)


EVENING = (  # the package's files, in the order of reading
    ("llama/model.py", "the model, which knows nothing of blocks or batches"),
    ("engine/sequence.py", "a sequence: its tokens, its block table, its text"),
    ("engine/input_processor.py", "a prompt and its parameters become sequences"),
    ("engine/block_pool.py", "blocks, reference counts and the free queue"),
    ("engine/prefix_cache.py", "the hash of a block, which stands for all text up to its end"),
    ("engine/block_manager.py", "which sequence holds which blocks; hits, growth, copy-on-write"),
    ("engine/kv_cache.py", "the tensors"),
    ("engine/tier.py", "the interface of a place behind the device"),
    ("tiers/host_tier.py", "one such place: host memory"),
    ("engine/scheduler.py", "who runs in this step"),
    ("engine/executor.py", "the seam between the engine and the hardware"),
    ("backends/torch/attention.py", "attention over blocks, in plain PyTorch"),
    ("backends/torch/model_runner.py", "a batch of sequences becomes a step of the model, and tokens"),
    ("engine/core.py", "the heart: schedule, launch, update, and what a failure does"),
    ("llm_engine.py", "vLLM's face on it"),
)


def museum_block(results: Results) -> str:
    """Return the exhibits of the museum: the room, whose fault it was, what went wrong, and the threads."""
    rows = [
        [fault.stage, fault.name, fault.project, fault.was, fault.figure or "-", threads_of(fault)]
        for fault in faults()
    ]
    return table(["room", "exhibit", "engine", "what went wrong", "in figures", "threads"], rows)


def threads_of(fault: Fault) -> str:
    return ", ".join(f"[#{thread.partition('#')[2]}]({address(thread)})" for thread in fault.threads)


def evening_block(results: Results) -> str:
    """Return the files of the package that one reads in an evening, with their lines of code."""
    lines = [len(code_lines((ROOT / "nanovllm" / file).read_text("utf-8"))) for file, _ in EVENING]
    rows = [
        [f"[{file}](nanovllm/{file})", what, f"{count:,}"] for (file, what), count in zip(EVENING, lines, strict=True)
    ]
    return table(["file", "what it holds", "lines"], [*rows, ["**all**", "", f"{sum(lines):,}"]])


def book_block(results: Results, pyproject: Path = ROOT / "pyproject.toml") -> str:
    """Return where the book is: at the address that pyproject.toml names, or where `make book` puts it."""
    project = tomllib.loads(pyproject.read_text(encoding="utf-8"))["project"]
    match project.get("urls", {}):
        case {"Documentation": address}:
            return f"[Read the course as a website]({address}), or build it: `make book` writes it to build/book.\n"
    return "To read the course as a website, build it: `make book` writes it to build/book.\n"


BLOCKS: dict[str, Callable[[Results], str]] = {
    "stages": stages_block,
    "path": path_block,
    "evening": evening_block,
    "museum": museum_block,
    "book": book_block,
}
