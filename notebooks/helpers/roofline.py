"""A roofline: what each way of a step takes, beside the least that reading and the least that multiplying takes."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, NullLocator

from nanovllm.bench import harness
from nanovllm.bench.floor import read_bandwidth
from notebooks.helpers import pictures
from notebooks.helpers.pictures import ACCENT, GREY, INK, LIGHT, USED
from notebooks.helpers.ways import ATTENTION, FEW, MANY, PACKED, PLAIN, WAYS, DecodeStep

LOOKS = {
    PLAIN: (ACCENT, "s--"), PACKED: (GREY, "^:"), ATTENTION: (GREY, "v-"), MANY: (INK, "x-"), FEW: (USED, "o-"),
}  # fmt: skip


class Measured(NamedTuple):
    ms: dict[tuple[str, int], float]  # by way and rows
    bandwidth: float  # bytes a second, of a read test in the same rounds
    operations: float  # a second, of one large product


def measure(
    step: DecodeStep, counts: Sequence[int], rounds: int, seconds: float, ways: Sequence[str] = WAYS
) -> Measured:
    """The ways that are there, in turns; and what this machine can do at most."""
    calls: dict[Any, Callable[[], float]] = {}
    for rows in counts:
        for way in step.ways(rows):
            if way in ways:
                calls[way, rows] = partial(step.seconds, way, rows)
    limits = {"read": lambda: read_bandwidth(step.llm), "multiply": partial(operations_a_second, step.engine.dtype)}
    found = harness.take_turns(calls | limits, rounds, least_rounds=1, seconds=seconds)
    middle = harness.medians(found)
    return Measured({key: 1000 * middle[key] for key in calls}, middle["read"], middle["multiply"])


def operations_a_second(dtype: torch.dtype, size: int = 1024) -> float:
    """Return operations per second of the quickest of some large products."""
    a, b = torch.ones(size, size, dtype=dtype), torch.ones(size, size, dtype=dtype)
    return 2 * size**3 / min(harness.seconds_of(lambda: a @ b) for _ in range(5))


def shares(step: DecodeStep, found: Measured) -> dict[tuple[str, int], float]:
    """Return the least share of the time that reading takes."""
    return {(way, rows): step.num_bytes(rows) / found.bandwidth / (ms / 1000) for (way, rows), ms in found.ms.items()}


# ---- pictures


def draw_roofline(ax: Axes, step: DecodeStep, found: Measured, title: str, is_first: bool) -> None:
    """Operations a second against operations a byte, a line for each way."""
    counts = sorted({rows for _, rows in found.ms})
    at = {rows: step.num_operations(rows) / step.num_bytes(rows) for rows in counts}
    draw_roof(ax, found, at[counts[0]] / 1.6, at[counts[-1]] * 3)
    for way, (color, style) in LOOKS.items():
        there = [rows for rows in counts if (way, rows) in found.ms]
        speeds = [step.num_operations(rows) / found.ms[way, rows] / 1e6 for rows in there]
        if there:
            ax.plot([at[rows] for rows in there], speeds, style, color=color, linewidth=1.4, markersize=5, label=way)
    ax.set(xscale="log", yscale="log", xlabel="operations a byte (below: rows)", title=title)
    ax.set(xticks=[*at.values()], xticklabels=[f"{x:.1f}\n{rows}" for rows, x in at.items()])
    ax.xaxis.set_minor_locator(NullLocator())
    ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}" if value >= 1 else f"{value:.1f}"))
    if is_first:
        ax.set(ylabel="billion operations a second")


def draw_roof(ax: Axes, found: Measured, left: float, right: float) -> None:
    """No step gets above the slope, reading, or the flat, multiplying."""
    edge, top = found.operations / found.bandwidth, found.operations / 1e9
    end = max(right, edge * 1.5)
    ax.plot([left, edge, end], [left * found.bandwidth / 1e9, top, top], color=LIGHT, linewidth=3)
    middle = (left * edge) ** 0.5
    pictures.label(ax, "reading", (middle, middle * found.bandwidth / 1e9), (-6, 4), GREY)
    pictures.label(ax, "multiplying", (end, top), (0, 5), GREY, ha="right")


def table_of(found: Measured, step: DecodeStep) -> str:
    """Milliseconds and shares of the floor, a column for each number of rows."""
    counts = sorted({rows for _, rows in found.ms})
    share = shares(step, found)

    def cell(way: str, rows: int) -> str:
        return f"{found.ms[way, rows]:.2f} ({share[way, rows]:.0%})" if (way, rows) in found.ms else ""

    floor = [f"{1000 * step.num_bytes(rows) / found.bandwidth:.2f}" for rows in counts]
    lines = [["", *(f"{rows} row" + "s" * (rows > 1) for rows in counts)], ["---"] * (len(counts) + 1)]
    lines += [["the floor", *floor]]
    lines += [[way, *(cell(way, rows) for rows in counts)] for way in WAYS if (way, counts[0]) in found.ms]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
