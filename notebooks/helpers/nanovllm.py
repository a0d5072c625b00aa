"""What the product's notebook needs: a decode step in four ways on one engine, and its floor; a roofline, a trace of
reads, pieces and who took them.

Where Numba is not installed there is one way, plain operations. timelines.py has a step over time, apart.py kernels
that Python runs, taking.py compiled code that keeps a diary.
"""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, NullLocator
from torch.nn.functional import linear

from nanovllm import LLM, SamplingParams
from nanovllm.cli.benchmarks.contexts import prompts_taken_as_computed
from nanovllm.cli.benchmarks.floor import read_bandwidth, weight_bytes
from nanovllm.kernels.cache import find_folder, is_complete
from nanovllm.kernels.choice import lack
from nanovllm.kernels.packed import PackedLinear
from notebooks.helpers import pictures
from notebooks.helpers.pictures import ACCENT, GREY, INK, LIGHT, PALE, PAPER, USED, Line
from stages.bench import harness
from stages.bench.models import num_parameters

PLAIN, PACKED, MANY, FEW = "plain operations", "packed linear layers", "kernels of many rows", "one call"
PAUSE = 0.006  # seconds: a helper that has nothing to do looks for steps for less than that
MAX_FEW = 4  # rows of a step that is one call
LOOKS = {PLAIN: (ACCENT, "s--"), PACKED: (GREY, "^:"), MANY: (INK, "x-"), FEW: (USED, "o-")}


def what_is_there(*dtypes: str) -> str:
    """Whether kernels are installed, and compiled, in a sentence."""
    if why := lack():
        return f"No kernels here: {why}. What follows shows plain operations alone."
    missing = [dtype for dtype in dtypes if not is_compiled(dtype)]
    if missing:
        return f"Kernels for {' and '.join(missing)} are being compiled, once on this machine: please wait."
    return f"Kernels for {' and '.join(dtypes)} have been compiled on this machine before: they are loaded."


def is_compiled(dtype: str) -> bool:
    folder = find_folder(dtype)
    return folder is not None and is_complete(folder)


# ---- a step, in four ways


class DecodeStep:
    """An engine in the middle of decoding `max_rows` sequences, each with `context` tokens computed or to compute."""

    def __init__(self, folder: Path, dtype: str, max_rows: int, context: int) -> None:
        room = {"kv_cache_tokens": max_rows * (context + 32), "max_num_seqs": max_rows, "watermark": 0.0}
        room |= {"max_num_batched_tokens": max(max_rows, 512), "enable_prefix_caching": False}
        backend = "torch" if lack() else "numba"
        self.llm = LLM(model=str(folder), dtype=dtype, attention_backend=backend, **room)
        self.engine, self.context = self.llm.llm_engine, context
        params = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
        with prompts_taken_as_computed(self.llm):
            for number in range(max_rows):
                self.engine.add_request(str(number), {"prompt_token_ids": [5 + number] * context}, params)
            self.engine.step()
        self.seqs = list(self.engine.scheduler.running)
        assert len(self.seqs) == max_rows, f"{len(self.seqs)} sequences run, {max_rows} were asked for"
        self._runner = self.engine.model_runner
        self._ways = ways_of(self._runner)

    def ways(self, rows: int) -> list[str]:
        """What a step of so many rows can be computed with here."""
        return [way for way in self._ways if way != FEW or rows <= MAX_FEW]

    @torch.inference_mode()
    def tokens(self, way: str, rows: int) -> list[int]:
        """The tokens that a step gives. It can be run again: nobody advances."""
        with self._ways[way]() as run:
            return [token.token_id for token in run([(seq, 1) for seq in self.seqs[:rows]])]

    @torch.inference_mode()
    def seconds(self, way: str, rows: int, times: int = 3) -> float:
        """The median of some steps in a row. One comes before, and a pause: threads of another way go to sleep."""
        batch = [(seq, 1) for seq in self.seqs[:rows]]
        with self._ways[way]() as run:
            time.sleep(PAUSE)
            run(batch)
            return statistics.median(harness.seconds_of(lambda: run(batch)) for _ in range(times))

    def num_bytes(self, rows: int) -> int:
        """What a step has to read: all weights, and the keys and values of each context."""
        slots = rows * (self.context + 1)
        return weight_bytes(self.llm) + slots * self.llm.kv_cache.bytes_per_token

    def num_operations(self, rows: int) -> int:
        """Of the linear layers: a product and a sum for each weight and row."""
        return 2 * rows * num_parameters(self.llm.model_config)


def ways_of(runner: Any) -> dict[str, Callable[[], Any]]:
    """Each is a context: a function that runs a step so. With the engine's own swaps, half of them undone."""
    if getattr(runner, "_few", None) is None:
        return {PLAIN: partial(as_it_is, runner)}
    plain, packed = partial(swapped_out, runner), partial(swapped_out, runner, keeps_packed=True)
    return {PLAIN: plain, PACKED: packed, MANY: partial(many_rows, runner), FEW: partial(as_it_is, runner)}


@contextmanager
def as_it_is(runner: Any) -> Iterator[Callable]:
    yield runner.run


@contextmanager
def many_rows(runner: Any) -> Iterator[Callable]:
    """The swapped submodules, however few rows there are."""
    from nanovllm.kernels.threads import numba_threads

    few, runner._logits, runner._few = runner._few, None, None
    try:
        with numba_threads():
            yield runner.run
    finally:
        runner._few = few


@contextmanager
def swapped_out(runner: Any, keeps_packed: bool = False) -> Iterator[Callable]:
    """Plain torch again; the linear layers may stay packed."""
    from nanovllm.kernels.many_rows import swap_linears

    model, packed = runner._model, {}

    def plain_of(module: Any) -> Any:
        if not isinstance(module, PackedLinear):
            return module
        packed[id(module.plain)] = module
        return module.plain

    kept = model.model, runner._attention, runner._few, runner.sample_rows
    model.model, runner._attention, runner._few = kept[0].plain, runner._plain_attention, None
    runner._logits = None
    del runner.sample_rows
    if not keeps_packed:
        swap_linears(model, plain_of)
    try:
        yield runner.run
    finally:
        swap_linears(model, lambda module: packed.get(id(module), module))
        model.model, runner._attention, runner._few, runner.sample_rows = kept


class Measured(NamedTuple):
    ms: dict[tuple[str, int], float]  # by way and rows
    bandwidth: float  # bytes a second, of a read test in the same rounds
    operations: float  # a second, of one large product


def measure(
    step: DecodeStep, counts: Sequence[int], rounds: int, seconds: float, ways: Sequence[str] = tuple(LOOKS)
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
    a, b = torch.ones(size, size, dtype=dtype), torch.ones(size, size, dtype=dtype)
    return 2 * size**3 / harness.seconds_of(lambda: a @ b)


def shares(step: DecodeStep, found: Measured) -> dict[tuple[str, int], float]:
    """Of the time, how much reading takes at least."""
    return {(way, rows): step.num_bytes(rows) / found.bandwidth / (ms / 1000) for (way, rows), ms in found.ms.items()}


def layer_ms(step: DecodeStep, counts: Sequence[int], rounds: int) -> dict[tuple[str, int], float]:
    """A walk over the gate-and-up layers of a model, with plain and with packed weights, where torch packs them."""
    model = step._runner._model.model
    plain = [layer.mlp.gate_up_proj for layer in getattr(model, "plain", model).layers]
    layers = [layer if isinstance(layer, PackedLinear) else PackedLinear(layer) for layer in plain]
    weights = [layer.weight for layer in layers]
    calls: dict[tuple[str, int], Callable[[], object]] = {}
    for rows in counts:
        x = torch.ones(rows, weights[0].shape[1], dtype=weights[0].dtype)
        calls["plain", rows] = lambda x=x: [linear(x, weight) for weight in weights]
        calls["packed", rows] = lambda x=x: [layer(x) for layer in layers]
    with torch.inference_mode():
        return harness.milliseconds(calls, rounds)


@contextmanager
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def seconds_on_one_core(step: DecodeStep) -> float:
    """A plain step's, without the profiler."""
    with one_thread():
        return step.seconds(PLAIN, 1)


# ---- pictures


def draw_roofline(ax: Axes, step: DecodeStep, found: Measured, title: str, named: bool) -> None:
    """Operations a second against operations a byte. No step gets above the slope, reading, or the flat, computing."""
    counts = sorted({rows for _, rows in found.ms})
    edge = found.operations / found.bandwidth
    at = [step.num_operations(rows) / step.num_bytes(rows) for rows in counts]
    xs = [at[0] / 1.6, edge, max(at[-1] * 3, edge * 1.5)]
    ax.plot(xs, [x * found.bandwidth / 1e9 for x in xs[:2]] + [found.operations / 1e9], color=LIGHT, linewidth=3)
    for way, (color, style) in LOOKS.items():
        rows_of = [rows for rows in counts if (way, rows) in found.ms]
        if rows_of:
            x = [at[counts.index(rows)] for rows in rows_of]
            y = [step.num_operations(rows) / found.ms[way, rows] / 1e6 for rows in rows_of]
            ax.plot(x, y, style, color=color, linewidth=1.4, markersize=5, label=way)
    ax.set(xscale="log", yscale="log", xlabel="operations a byte (below: rows)", title=title)
    ax.set(xticks=at, xticklabels=[f"{x:.1f}\n{rows}" for x, rows in zip(at, counts, strict=True)])
    ax.xaxis.set_minor_locator(NullLocator())
    ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}" if value >= 1 else f"{value:.1f}"))
    if named:
        ax.set(ylabel="billion operations a second")
        ax.legend(frameon=False, loc="lower right")


def draw_trace(ax: Axes, trace: Sequence[str], title: str) -> None:
    """What a kernel does, in order: it reads the weight, it reads rows of x, it multiplies and adds."""
    colors = {"weight": ACCENT, "x": USED, "fma": PALE}
    for what, color in colors.items():
        boxes = [pictures.box(i + 0.06, 0.88, 0, 1) for i, done in enumerate(trace) if done == what]
        pictures.polygons(ax, boxes, color)
    ax.set(ylim=(-0.05, 1.05), yticks=[0.5], yticklabels=[title], xticks=[])
    ax.tick_params(axis="y", length=0, labelcolor=INK)
    ax.spines[:].set_visible(False)


def draw_parts(top: Axes, bottom: Axes, parts: Sequence[Any], row: int) -> None:
    """What a kernel knows after each part: the highest score, the sum; and what torch's twin keeps, their logarithm."""
    at = range(1, len(parts) + 1)
    pictures.lines(top, [Line(at, [part.peaks[row] for part in parts], style="o-", color=USED)], "", "peak")
    pictures.lines(bottom, [Line(at, [part.sums[row] for part in parts], style="o-", color=ACCENT)], "part", "sum")
    top.set(xticks=list(at))
    bottom.set(xticks=list(at), ylim=(0, None))


def draw_pieces(ax: Axes, pieces: Sequence[Any], title: str) -> None:
    """Two strips, one a worker; in each its pieces, with their numbers."""
    start, end = min(piece.start for piece in pieces), max(piece.end for piece in pieces)
    for worker, color in ((0, USED), (1, ACCENT)):
        mine = [piece for piece in pieces if piece.worker == worker]
        boxes = [pictures.box(p.start - start, p.end - p.start, 1.05 - worker, 0.9) for p in mine]
        pictures.polygons(ax, boxes, color, PAPER, 0.8)
        for piece in mine:
            at = (piece.start + piece.end) / 2 - start, 1.5 - worker
            ax.text(*at, str(piece.number), ha="center", va="center", fontsize=6.5, color=PAPER)
    ax.set(xlim=(0, max(ax.get_xlim()[1], end - start)))
    ax.set(ylim=(0, 2), yticks=[0.5, 1.5], yticklabels=["helper", "main"], title=title)
    ax.tick_params(axis="y", length=0, labelcolor=INK)
    ax.spines["left"].set_visible(False)
    ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: pictures.duration(value) if value else "0"))


def table_of(found: Measured, step: DecodeStep) -> str:
    """Milliseconds and shares of the floor, a column for each number of rows."""
    counts = sorted({rows for _, rows in found.ms})
    share = shares(step, found)
    lines = [
        f"| | {' | '.join(f'{rows} row' + 's' * (rows > 1) for rows in counts)} |",
        "|---" * (len(counts) + 1) + "|",
    ]
    floor = [f"{1000 * step.num_bytes(rows) / found.bandwidth:.2f}" for rows in counts]
    lines.append(f"| the floor, ms | {' | '.join(floor)} |")
    for way in LOOKS:
        cells = [
            f"{found.ms[way, rows]:.2f} ({share[way, rows]:.0%})" if (way, rows) in found.ms else "" for rows in counts
        ]
        if any(cells):
            lines.append(f"| {way}, ms (share) | {' | '.join(cells)} |")
    return "\n".join(lines)
