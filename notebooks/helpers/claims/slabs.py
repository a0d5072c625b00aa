"""The text's four slabs: its plan for 80 GB, what they leave empty, and when they refuse (claim 6)."""

import random
import statistics
from collections.abc import Callable
from typing import NamedTuple

from matplotlib.figure import Figure

from notebooks.helpers import pictures
from notebooks.helpers.claims.findings import Finding, finding
from notebooks.helpers.pictures import INK, PALE, PAPER, USED
from stages.bench.texts.memory_pool import KB, MB, PLAN, Slabs

Draw = Callable[[random.Random], int]  # the bytes of a request
TRAFFIC: dict[str, Draw] = {
    "uniform up to 2 MB": lambda rng: rng.randint(1, 2 * MB),
    "uniform up to 256 MB": lambda rng: rng.randint(1, 256 * MB),
    "its own needs": lambda rng: rng.choices((2 * MB, 64 * MB, 512 * KB), (70, 20, 10))[0],
}


class Served(NamedTuple):
    """The result of random traffic."""

    inside: float  # share of the held bytes that were not asked for, on average
    refused: float  # share of the requests
    in_use: float | None  # share of all memory that was held and asked for at the first refusal


def serve(slabs: Slabs, draw: Draw, num_operations: int = 6000, seed: int = 0, frees: float = 0.45) -> Served:
    """Allocate and free at random."""
    rng, pieces, empty, refusals = random.Random(seed), list[tuple[int, int, int]](), list[float](), list[float]()
    held = asked = 0
    for _ in range(num_operations):
        if pieces and rng.random() < frees:
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
    return Served(statistics.mean(empty), len(refusals) / len(empty), refusals[0] if refusals else None)


def in_words(size: int) -> str:
    """Return a size in KB or MB.

    >>> in_words(2**18), in_words(2**25)
    ('256 KB', '32 MB')
    """
    return f"{size // MB} MB" if size >= MB else f"{size // KB} KB"


def draw_plan(slabs: Slabs) -> Figure:
    """Draw the 80 GB, a stretch for each size, with the share that its own needs leave empty inside a block."""
    needs = {256 * KB: 1.0, 2 * MB: (0.7 * 2 + 0.1 * 0.5) / (0.8 * 2), 32 * MB: 1.0, 256 * MB: 64 / 256}
    fig, (ax,) = pictures.figure("The plan for 80 GB, and what its own needs leave empty in each size", height=1.6)
    left = 0.0
    for size, share in PLAN:
        full = needs[size] * share if size in (2 * MB, 256 * MB) else 0.0
        for start, width, fill in ((left, full, USED), (left + full, share - full, PALE if full else PAPER)):
            pictures.polygons(ax, [pictures.box(start, width, 0, 1)], fill, INK)
        text = f"{in_words(size)}\n{slabs.slabs[size].num_blocks:,}"
        pictures.label(ax, text, (left + share / 2, 1.05), (0, 2))
        left += share
    pictures.legend(ax, {"filled": USED, "empty inside": PALE, "never asked for": PAPER})
    ax.set(xlim=(0, 1), ylim=(0, 1.9), xticks=[], yticks=[])
    pictures.bare(ax)
    return fig


def finding_6(seeds: int = 5, num_operations: int = 6000) -> Finding:
    runs = {name: [serve(Slabs(), draw, num_operations, s) for s in range(seeds)] for name, draw in TRAFFIC.items()}
    shown = []
    for name, served in runs.items():
        text = f"{name}: {statistics.mean(run.inside for run in served):.0%} empty inside blocks"
        if any(run.refused for run in served):
            first = statistics.mean(run.in_use for run in served if run.in_use is not None)
            text += f", {statistics.mean(run.refused for run in served):.0%} refused, the first at {first:.1%} in use"
        shown.append(text)
    one_class = serve(Slabs(plan=((2 * MB, 1.0),)), TRAFFIC["uniform up to 2 MB"], num_operations)
    _, size = Slabs().allocate(3 * MB)
    own = statistics.mean(run.inside for run in runs["its own needs"])
    return finding(
        6,
        holds_as_worded=own > 0.5,
        one_class=one_class.inside,
        just_above=1 - 3 * MB / size,
        rows="; ".join(shown),
        own=own,
    )
