"""The text's four slabs, what they leave empty and refuse (claim 6), and a caching allocator (24)."""

import random
from collections.abc import Callable, Iterable
from itertools import accumulate
from statistics import mean
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from notebooks.helpers import pictures, size
from notebooks.helpers.claims.findings import Finding, finding, of_gpu
from notebooks.helpers.pictures import INK, PALE, PAPER, USED
from stages.bench.texts.caching_sketch import Block, CachingAllocator, by_text, by_torch
from stages.bench.texts.memory_pool import KB, MB, PLAN, Slabs, benchmark_steps

Draw = Callable[[random.Random], int]  # the bytes of a request
TRAFFIC: dict[str, Draw] = {
    "uniform up to 2 MB": lambda rng: rng.randint(1, 2 * MB),
    "uniform up to 256 MB": lambda rng: rng.randint(1, 256 * MB),
    "its own needs": lambda rng: rng.choices((2 * MB, 64 * MB, 512 * KB), (70, 20, 10))[0],
}


def draw_row(
    ax: Axes, parts: Iterable[tuple[float, str]], left: float = 0, bottom: float = 0, height: float = 1
) -> None:
    """Draw boxes of these widths and colors side by side."""
    for width, fill in parts:
        pictures.polygons(ax, [pictures.box(left, width, bottom, height)], fill, INK)
        left += width


# ---- slabs


class Served(NamedTuple):
    """The result of random traffic."""

    inside: float  # share of the held bytes that were not asked for, on average
    refused: float  # share of the requests
    in_use: float | None  # share of all memory that was held and asked for at the first refusal


def serve(slabs: Slabs, draw: Draw, num_operations: int = 6000, seed: int = 0) -> Served:
    """Allocate and free at random."""
    rng, pieces, empty, refusals = random.Random(seed), list[tuple[int, int, int]](), list[float](), list[float]()
    held = asked = 0
    for _ in range(num_operations):
        if pieces and rng.random() < 0.45:
            block, size, num_bytes = pieces.pop(rng.randrange(len(pieces)))
            slabs.release(block, size)
            held, asked = held - size, asked - num_bytes
            continue
        num_bytes = draw(rng)
        try:
            block, size = slabs.allocate(num_bytes)
        except MemoryError:
            refusals.append(asked / slabs.num_bytes)
        else:
            pieces.append((block, size, num_bytes))
            held, asked = held + size, asked + num_bytes
        empty.append(1 - asked / max(held, 1))
    return Served(mean(empty), len(refusals) / len(empty), refusals[0] if refusals else None)


def in_words(size: int) -> str:
    """Return a size in KB or MB.

    >>> in_words(2**18), in_words(2**25)
    ('256 KB', '32 MB')
    """
    return f"{size // MB} MB" if size >= MB else f"{size // KB} KB"


def draw_plan() -> Figure:
    """Draw the 80 GB, a stretch for each size, with the share that its own needs leave empty inside a block."""
    needs = {2 * MB: (0.7 * 2 + 0.1 * 0.5) / (0.8 * 2), 256 * MB: 64 / 256}
    fig, (ax,) = pictures.figure("The plan for 80 GB, and what its own needs leave empty in each size", height=1.6)
    for (block, share), right in zip(PLAN, accumulate(share for _, share in PLAN), strict=True):
        full = share * needs.get(block, 0)
        draw_row(ax, [(full, USED), (share - full, PALE if full else PAPER)], left=right - share)
        text = f"{in_words(block)}\n{Slabs().slabs[block].num_blocks:,}"
        pictures.label(ax, text, (right - share / 2, 1.05), (0, 2))
    pictures.legend(ax, {"filled": USED, "empty inside": PALE, "never asked for": PAPER})
    ax.set(xlim=(0, 1), ylim=(0, 1.9), xticks=[], yticks=[])
    pictures.bare(ax)
    return fig


def finding_6(num_operations: int = 6000) -> Finding:
    seeds = range(size(5, 1))
    runs = {name: [serve(Slabs(), draw, num_operations, seed) for seed in seeds] for name, draw in TRAFFIC.items()}
    inside = {name: mean(run.inside for run in served) for name, served in runs.items()}
    shown = []
    for name, served in runs.items():
        text = f"{name}: {inside[name]:.0%} empty inside blocks"
        if any(run.refused for run in served):
            first = mean(run.in_use for run in served if run.in_use is not None)
            text += f", {mean(run.refused for run in served):.0%} refused, the first at {first:.1%} in use"
        shown.append(text)
    return finding(
        6,
        holds_as_worded=inside["its own needs"] > 0.5,
        one_class=serve(Slabs(plan=((2 * MB, 1.0),)), TRAFFIC["uniform up to 2 MB"], num_operations).inside,
        just_above=1 - 3 * MB / Slabs().allocate(3 * MB)[1],
        rows="; ".join(shown),
        own=inside["its own needs"],
    )


# ---- a caching allocator


def draw(moments: dict[str, list[list[tuple[int, bool]]]]) -> Figure:
    """Draw snapshots, a line for each segment."""
    title = "A freed block merges with its neighbors, and a held one keeps holes apart"
    fig, axes = pictures.figure(title, 3.0, rows=2, columns=2)
    widest = max(sum(size for size, _ in segment) for snapshot in moments.values() for segment in snapshot)
    for ax, (name, snapshot) in zip(axes, moments.items(), strict=True):
        for row, segment in enumerate(snapshot):
            draw_row(ax, [(size, USED if is_held else PAPER) for size, is_held in segment], bottom=-row, height=0.7)
        ax.set(title=name, xlim=(0, widest), ylim=(-1.2, 1.2), xticks=[], yticks=[])
        pictures.bare(ax)
    pictures.legend(axes[1], {"held": USED, "free": PAPER})
    return fig


def story() -> dict[str, list[list[tuple[int, bool]]]]:
    """Return snapshots of a small device: a segment splits, has a hole, and merges again."""
    allocator, moments = CachingAllocator(16 * MB), {}
    allocator.release(allocator.allocate(8 * MB))
    two, three, one = (allocator.allocate(size * MB) for size in (2, 3, 1))
    moments["a free segment of 8 MB: 2, 3 and 1 are taken"] = allocator.snapshot()
    allocator.release(two)
    allocator.release(one)
    moments["2 and 1 are freed"] = allocator.snapshot()
    allocator.allocate(6 * MB)
    moments["6 are taken: no hole fits, so a new segment"] = allocator.snapshot()
    allocator.release(three)
    moments["3 are freed: one block of 8"] = allocator.snapshot()
    return moments


def peak_empty(steps: Iterable[int | None], size: int, segment_size: Callable[[int], int]) -> float:
    """Return the largest share of the reserved memory that no block has, once more than 100 blocks are held.

    `steps` are those of the text's benchmark: an index to free, or None to allocate.
    """
    allocator, held, peak = CachingAllocator(2**40, segment_size), list[Block](), 0.0
    for index in steps:
        if index is None:
            held.append(allocator.allocate(size))
        else:
            allocator.release(held.pop(index))
        if len(held) > 100:
            peak = max(peak, 1 - size * len(held) / allocator.reserved)
    return peak


def largest_after(max_split: int | None) -> int:
    """Return the largest request in MB that fits after a small one was taken from a segment of 600 MB.

    Everything else is full.
    """
    allocator = CachingAllocator(602 * MB, max_split=max_split)
    allocator.release(allocator.allocate(600 * MB))
    allocator.allocate(2 * MB)
    return max(size for segment in allocator.snapshot() for size, is_held in segment if not is_held) // MB


def finding_24(num_operations: int = 400) -> Finding:
    empty = {rule.__name__: peak_empty(benchmark_steps(num_operations), 5 * MB, rule) for rule in (by_text, by_torch)}
    gpu = of_gpu(5, "Claim 5", lambda gpu, rows: f"{rows['caching']['empty share']:.1%} on {gpu}")
    return finding(24, **empty, split=largest_after(None), whole=largest_after(512 * MB), gpu=gpu)
