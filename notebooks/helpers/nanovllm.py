"""Helpers of the package's notebook: a decode step in plain operations and as one compiled call, against its floor.

Without Numba there are only plain operations.
"""

import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile

from nanovllm import LLM, SamplingParams
from nanovllm.backends.cpu.backend import NumbaBackend, missing_requirement
from nanovllm.backends.cpu.compiler import find_folder, is_complete
from nanovllm.backends.torch.attention import PagedAttention
from nanovllm.backends.torch.backend import TorchBackend
from nanovllm.bench import harness
from nanovllm.bench.floor import device_bandwidth, weight_bytes
from nanovllm.checkpoints.weights import load_model
from nanovllm.llama import ModelConfig
from nanovllm.quantization import GROUP, QuantizedLinear, quantize_int4
from notebooks.helpers import pictures
from notebooks.helpers.pictures import ACCENT, GREY, INK, LIGHT, PAPER, USED, Line
from stages.bench.counting import silent_stderr
from stages.bench.models import num_parameters
from stages.bench.peers import prompts_taken_as_computed

PLAIN, KERNELS = "plain operations", "one compiled call"
LOOKS = {PLAIN: (ACCENT, "s--"), KERNELS: (USED, "o-")}
FORMAT_LOOKS = (ACCENT, "s--", 0), (USED, "o-", 0), (INK, "x-", 7), (GREY, "v-", -7)  # colors, lines, where names go
PAUSE = 0.006  # seconds: a bit longer than an idle helper thread looks for work
KINDS = {"linear": USED, "attention": ACCENT, "others": GREY}  # of an operation


def describe_kernels(*dtypes: str) -> str:
    """Say in a sentence whether kernels are installed and compiled."""
    if why := missing_requirement():
        return f"Kernels are unavailable: {why}. The pictures below show plain operations alone."
    folders = {dtype: find_folder(dtype) for dtype in dtypes}
    missing = [dtype for dtype, folder in folders.items() if folder is None or not is_complete(folder)]
    if missing:
        return f"Kernels for {' and '.join(missing)} are being compiled. This happens once per machine."
    return f"Kernels for {' and '.join(dtypes)} are already compiled on this machine."


# ---- a decode step, in both ways


class DecodeStep:
    """An engine that decodes `max_rows` sequences, each with a context of `context` tokens."""

    def __init__(self, folder: Path, dtype: str, max_rows: int, context: int, quantization: str | None = None) -> None:
        room = {"kv_cache_tokens": max_rows * (context + 32), "max_num_seqs": max_rows, "watermark": 0.0}
        room |= {"max_num_batched_tokens": max(max_rows, 512), "enable_prefix_caching": False}
        room |= {"attention_backend": "torch" if missing_requirement() else "numba", "quantization": quantization}
        self.llm = LLM(model=str(folder), device="cpu", dtype=dtype, **room)
        self.engine, self.context = self.llm.llm_engine, context
        params = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
        with prompts_taken_as_computed(self.llm):
            self.engine.kv_cache.blocks.normal_(generator=torch.Generator().manual_seed(0))  # contexts that differ
            for number in range(max_rows):
                self.engine.add_request(str(number), {"prompt_token_ids": [300 + 37 * number] * context}, params)
            self.engine.step()
        self.seqs = list(self.engine.scheduler.running)
        assert len(self.seqs) == max_rows, f"{len(self.seqs)} of {max_rows} sequences are running"
        self.runner = self.engine.executor
        has_kernels = isinstance(self.runner.backend, NumbaBackend)
        self._backends: dict[str, Any] = {KERNELS if has_kernels else PLAIN: self.runner.backend}
        if has_kernels and quantization is None:
            cache, device = self.engine.kv_cache, torch.device("cpu")
            attention = PagedAttention(cache, self.engine.config.tile_slots())
            model = load_model(folder, self.llm.model_config, self.engine.dtype, device)
            self._backends[PLAIN] = TorchBackend(model, attention, cache.block_size, device)

    @property
    def ways(self) -> list[str]:
        """The ways in which this machine can compute the step."""
        return [way for way in LOOKS if way in self._backends]

    @contextmanager
    def computed(self, way: str) -> Iterator[Callable]:
        """Yield a function that runs a step in one way."""
        before, self.runner.backend = self.runner.backend, self._backends[way]
        try:
            yield self.runner.run
        finally:
            self.runner.backend = before

    @torch.inference_mode()
    def tokens(self, way: str, rows: int) -> list[int]:
        """Return the tokens of a step. No sequence advances, so it can be repeated."""
        with self.computed(way) as run:
            return run([(seq, 1) for seq in self.seqs[:rows]]).token_ids

    @torch.inference_mode()
    def seconds(self, way: str, rows: int, times: int = 3) -> float:
        """Return the median of some steps in a row, after a pause for the threads of other ways and a first step."""
        batch = [(seq, 1) for seq in self.seqs[:rows]]
        with self.computed(way) as run:
            time.sleep(PAUSE)
            run(batch)
            return statistics.median(harness.seconds_of(lambda: run(batch)) for _ in range(times))

    def num_bytes(self, rows: int) -> int:
        """Return the bytes that a step has to read: all weights, and the keys and values of each context."""
        slots = rows * (self.context + 1)
        return weight_bytes(self.llm) + slots * self.engine.kv_cache.bytes_per_token

    def num_operations(self, rows: int) -> int:
        """Return the operations of the linear layers: a product and a sum for each weight and row."""
        return 2 * rows * num_parameters(self.llm.model_config)


# ---- plain operations over time


class Span(NamedTuple):
    """An operation, in microseconds from the start of its step."""

    name: str
    start: float
    end: float

    @property
    def kind(self) -> str:
        """Return a key of KINDS."""
        if "linear" in self.name or "mm" in self.name:
            return "linear"
        return "attention" if "attention" in self.name else "others"


def profile_plain(step: DecodeStep) -> list[Span]:
    """Return PyTorch's top-level operations of the fastest of some plain steps on one core.

    The profiler adds a bit to each operation.
    """
    batch, threads = [(step.seqs[0], 1)], torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with step.computed(PLAIN) as run:
            run(batch)
            return min((profiled(run, batch) for _ in range(40)), key=lambda spans: spans[-1].end)
    finally:
        torch.set_num_threads(threads)


def profiled(run: Callable, batch: list) -> list[Span]:
    with silent_stderr(), profile(activities=[ProfilerActivity.CPU]) as profiler:
        run(batch)
    events = [event for event in profiler.events() if event.cpu_parent is None and event.name.startswith("aten::")]
    events.sort(key=lambda event: event.time_range.start)
    first = events[0].time_range.start
    return [Span(event.name, event.time_range.start - first, event.time_range.end - first) for event in events]


def time_shares(spans: Sequence[Span]) -> dict[str, float]:
    """Return the share of the time that each kind takes, and "none": Python between operations.

    >>> time_shares([Span("aten::mm", 0, 6), Span("aten::add", 8, 10)])
    {'linear': 0.6, 'attention': 0.0, 'others': 0.2, 'none': 0.2}
    """
    whole = spans[-1].end
    shares = {kind: sum(span.end - span.start for span in spans if span.kind == kind) / whole for kind in KINDS}
    return shares | {"none": round(1 - sum(shares.values()), 6)}


def draw_spans(ax: Axes, spans: Sequence[Span], title: str) -> None:
    """Draw a sliver for each operation. Between them, in white, Python runs."""
    for kind, color in KINDS.items():
        boxes = [pictures.box(span.start, span.end - span.start, 0, 1) for span in spans if span.kind == kind]
        pictures.polygons(ax, boxes, color, PAPER, 0.15)
    ax.set(xlim=(spans[0].start, spans[-1].end), ylim=(-0.05, 1.05), yticks=[], title=title)
    ax.spines["left"].set_visible(False)
    ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value / 1000:g} ms"))


# ---- a group of quantized weights


class Group(NamedTuple):
    """The weights of a group, and what becomes of them in 4 bits."""

    row: int
    weights: Tensor  # [GROUP]
    q: Tensor  # uint8 [GROUP]
    scale: float
    minimum: float

    @property
    def dequantized(self) -> Tensor:
        """The weights as a step uses them."""
        return self.q * self.scale + self.minimum


def widest_group(folder: Path) -> Group:
    """Return the group of layer 0's down projection whose largest weight stands out most."""
    weight = load_file(folder / "model.safetensors")["model.layers.0.mlp.down_proj.weight"].float()
    groups = weight.unflatten(1, (-1, GROUP))  # [outputs, groups, GROUP]
    row, number = divmod(int((groups.abs().amax(2) / groups.abs().median(2).values).argmax()), groups.shape[1])
    q, scales, minima, _ = quantize_int4(weight[row : row + 1])
    return Group(
        row, groups[row, number], q.view(-1, GROUP)[number], float(scales[0, number]), float(minima[0, number])
    )


def draw_group(ax: Axes, group: Group) -> None:
    """Draw each weight, and the level that stands for it."""
    places = range(len(group.weights))
    for level in range(16):
        ax.axhline(group.minimum + level * group.scale, color=LIGHT, linewidth=0.7, zorder=0)
    ax.vlines(places, group.weights, group.dequantized, color=GREY, linewidth=1)
    ax.plot(places, group.weights, "o", color=ACCENT, markersize=4, label="weight")
    ax.plot(places, group.dequantized, "_", color=USED, markersize=9, markeredgewidth=2, label="its level")
    ax.set(xlabel="32 weights of a row, and the 16 levels", xticks=[])
    ax.legend(frameon=False, fontsize=8)


# ---- a rounding that falls to the other side


class Flip(NamedTuple):
    """An input of a linear layer that is rounded to the other of its two neighbors."""

    linear: int  # in the order of a step
    token: int
    number: int


class Rounded(NamedTuple):
    """A text that went through a model."""

    steps: list[Tensor]  # the inputs of each linear layer before they are rounded, [num_tokens, size], in units of 1
    inputs: list[Tensor]  # the same inputs after that, [num_tokens, size]
    logits: Tensor  # [num_tokens, vocab_size]


class RoundingModel:
    """A model with int8 weights in plain operations, whose linear layers round their inputs to 8 bits as kernels do."""

    def __init__(self, folder: Path) -> None:
        cpu, config = torch.device("cpu"), ModelConfig.from_folder(folder)
        self._model = load_model(folder, config, torch.float32, cpu, quantization="int8")
        for layer in self._model.modules():
            if isinstance(layer, QuantizedLinear):
                layer.forward = partial(self._multiply, layer.dequantize())

    @torch.inference_mode()
    def run(self, token_ids: list[int], pieces: int = 1, rounds: bool = True, flip: Flip | None = None) -> Rounded:
        """Compute a text. Each sum of a linear layer is added up in some pieces, which are then added."""
        self._steps, self._inputs = list[Tensor](), list[Tensor]()
        self._pieces, self._rounds, self._flip = pieces, rounds, flip
        hidden = self._model(torch.tensor(token_ids), torch.arange(len(token_ids)), attend_causally)
        logits = self._model.compute_logits(hidden)
        return Rounded(self._steps, self._inputs, logits)

    def _multiply(self, weight: Tensor, x: Tensor) -> Tensor:
        groups = x.unflatten(1, (-1, GROUP))  # [num_tokens, groups, GROUP]
        scales = groups.abs().amax(2, keepdim=True).clamp_min(1e-30) / 127
        steps = (groups / scales).flatten(1)
        whole = steps.round()
        if self._flip is not None and self._flip.linear == len(self._steps):
            at = self._flip.token, self._flip.number
            whole[at] = 2 * steps[at].floor() + 1 - whole[at]
        self._steps.append(steps)
        self._inputs.append((whole.view_as(groups) * scales).flatten(1) if self._rounds else x)
        parts = zip(self._inputs[-1].chunk(self._pieces, 1), weight.chunk(self._pieces, 1), strict=True)
        return sum(some @ weights.T for some, weights in parts)


def attend_causally(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attend from each token of a text to itself and the tokens before it."""
    q, k, v = (x.transpose(0, 1) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(0, 1)


def flips_between(one: Rounded, other: Rounded) -> list[Flip]:
    """Return the roundings of the first linear layer that has some which differ."""
    for linear, (a, b) in enumerate(zip(one.steps, other.steps, strict=True)):
        if flips := (a.round() != b.round()).nonzero().tolist():
            return [Flip(linear, token, number) for token, number in flips]
    return []


def changed_tokens(one: Rounded, other: Rounded) -> list[int]:
    """Return the places in the text after which another token is the likeliest."""
    return (one.logits.argmax(1) != other.logits.argmax(1)).nonzero().flatten().tolist()


def spread(one: Rounded, other: Rounded) -> list[float]:
    """Return the largest difference of each linear layer's inputs, as a share of the largest input."""
    both = zip(one.inputs, other.inputs, strict=True)
    return [float((a - b).abs().max() / a.abs().max()) for a, b in both]


class Case(NamedTuple):
    """A text, a rounding that depends on the order of a sum, and what becomes of it."""

    token_ids: list[int]
    one: Rounded  # each sum in one piece
    other: Rounded  # each sum in two halves
    flip: Flip
    flipped: Rounded  # as `one`, but for this rounding
    num_tried: int  # flips up to this one

    @property
    def before_rounding(self) -> list[float]:
        """Return the number in both orders before it is rounded, in steps of the 8 bits."""
        at = self.flip.token, self.flip.number
        return [float(each.steps[self.flip.linear][at]) for each in (self.one, self.other)]


def find_case(model: RoundingModel, texts: Sequence[list[int]]) -> Case:
    """Return the first rounding that differs and changes a likeliest token, or else the last that differs."""
    cases: list[Case] = []
    for token_ids in texts:
        one, other = model.run(token_ids), model.run(token_ids, pieces=2)
        for flip in flips_between(one, other):
            flipped = model.run(token_ids, flip=flip)
            cases.append(Case(token_ids, one, other, flip, flipped, len(cases) + 1))
            if changed_tokens(one, flipped):
                return cases[-1]
    if not cases:
        raise ValueError(f"in none of {len(texts)} texts does a rounding depend on the order of sums")
    return cases[-1]


def draw_flip(ax: Axes, case: Case) -> None:
    """Draw the number in both orders, close to the middle between two whole numbers."""
    numbers, looks = case.before_rounding, (("one piece", USED), ("two halves", ACCENT))
    middle = math.floor(min(numbers)) + 0.5
    away = [1e6 * (number - middle) for number in numbers]
    for row, (number, x, (name, color)) in enumerate(zip(numbers, away, looks, strict=True)):
        ax.plot(x, -row, "o", color=color, markersize=6)
        pictures.label(ax, f"{name}: {round(number)}", (x, -row), (0, 8), color)
    ax.axvline(0, color=INK, linewidth=0.8, linestyle=":")
    most = 1.6 * max(map(abs, away))
    ax.set(xlim=(-most, most), ylim=(-1.6, 0.8), yticks=[], xlabel=f"millionths of a step from {middle}")
    ax.set(title="a number before it is rounded")
    ax.spines["left"].set_visible(False)


def draw_spread(ax: Axes, flipped: Sequence[float], unrounded: Sequence[float]) -> None:
    """Draw the largest difference of each linear layer's inputs, after one flip and in a model that rounds nothing."""
    both = (flipped, "one rounding flipped", ACCENT, "-"), (unrounded, "two halves, no rounding", USED, "--")
    for values, name, color, style in both:
        places = [place for place, value in enumerate(values) if value > 0]
        ax.plot(places, [values[place] for place in places], style, color=color, linewidth=1.6, label=name)
    ax.set(yscale="log", xlabel="linear layers, in order", title="largest difference of the inputs")
    ax.legend(frameon=False, fontsize=8)


def draw_likeliest(ax: Axes, case: Case, at: int, text_of: Callable[[list[int]], str]) -> None:
    """Draw the logits of the likeliest tokens after a place in the text, without the flip and with it."""
    logits = [each.logits[at] for each in (case.one, case.flipped)]
    likeliest = dict.fromkeys(int(each.argmax()) for each in logits)  # one token, if the flip changes none
    for token, color in zip(likeliest, (USED, ACCENT), strict=False):
        values = [float(each[token]) for each in logits]
        ax.plot([0, 1], values, "o-", color=color, markersize=5)
        pictures.label(ax, repr(text_of([token])), (1, values[1]), (6, 0), color)
    ax.set(xlim=(-0.2, 1.5), xticks=[0, 1], xticklabels=["as it is", "flipped"], title="logits of the likeliest two")


def alone_and_beside(folder: Path, backend: str, prompts: list[str], num_tokens: int) -> list[list[float]]:
    """Return the log-probabilities of the first prompt's output, alone and beside the others, with int8 weights."""
    room = {"kv_cache_tokens": 4096, "enable_prefix_caching": False, "attention_backend": backend}
    llm = LLM(model=str(folder), device="cpu", dtype="float32", quantization="int8", **room)
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True, logprobs=1)

    def first_of(prompts: list[str]) -> list[float]:
        output = llm.generate(prompts, params, use_tqdm=False)[0].outputs[0]
        return [each[token].logprob for token, each in zip(output.token_ids, output.logprobs or [], strict=True)]

    return [first_of(prompts[:1]), first_of(prompts)]


# ---- a roofline


class Measured(NamedTuple):
    """The best times of a step, and the limits of the machine in the same rounds."""

    ms: dict[tuple[str, int], float]  # by way and rows
    bandwidth: float  # bytes per second, of a read test
    operations: float  # per second, of one large product


def measure(
    step: DecodeStep, counts: Sequence[int], rounds: int, seconds: float, ways: Sequence[str] = tuple(LOOKS)
) -> Measured:
    """Time the available ways in turns, and the limits of this machine."""
    calls: dict[Any, Callable[[], float]] = {}
    for rows in counts:
        for way in step.ways:
            if way in ways:
                calls[way, rows] = partial(step.seconds, way, rows)
    limits = {
        "read": partial(device_bandwidth, step.engine.device),
        "multiply": partial(operations_per_second, step.engine.dtype),
    }
    results = harness.take_turns(calls | limits, rounds, least_rounds=1, seconds=seconds)
    ms = {key: 1000 * min(result[key] for result in results) for key in calls}
    return Measured(ms, *(max(result[name] for result in results) for name in limits))


def operations_per_second(dtype: torch.dtype, size: int = 1024) -> float:
    """Return the speed of the fastest of some large products."""
    a, b = torch.ones(size, size, dtype=dtype), torch.ones(size, size, dtype=dtype)
    return 2 * size**3 / min(harness.seconds_of(lambda: a @ b) for _ in range(5))


def floor_shares(step: DecodeStep, measured: Measured) -> dict[tuple[str, int], float]:
    """Return the floor's share of each time: reading alone over the whole step."""
    return {
        (way, rows): step.num_bytes(rows) / measured.bandwidth / (ms / 1000) for (way, rows), ms in measured.ms.items()
    }


def draw_roofline(ax: Axes, step: DecodeStep, measured: Measured, title: str) -> None:
    """Draw a line for each way: operations per second against operations per byte."""
    counts = sorted({rows for _, rows in measured.ms})
    at = {rows: step.num_operations(rows) / step.num_bytes(rows) for rows in counts}
    draw_roof(ax, measured, at[counts[0]] / 1.6, at[counts[-1]] * 3)
    for way, (color, style) in LOOKS.items():
        timed = [rows for rows in counts if (way, rows) in measured.ms]
        speeds = [step.num_operations(rows) / measured.ms[way, rows] / 1e6 for rows in timed]
        if timed:
            ax.plot([at[rows] for rows in timed], speeds, style, color=color, linewidth=1.4, markersize=5, label=way)
    ax.set(xscale="log", yscale="log", xlabel="operations per byte (below: rows)", title=title)
    ax.set(xticks=[*at.values()], xticklabels=[f"{x:.1f}\n{rows}" for rows, x in at.items()])
    ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_minor_locator(NullLocator())
    ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}" if value >= 1 else f"{value:.1f}"))


def draw_roof(ax: Axes, measured: Measured, left: float, right: float) -> None:
    """Draw the limits: the slope is reading, and the flat part is multiplying."""
    edge, top = measured.operations / measured.bandwidth, measured.operations / 1e9
    end = max(right, edge * 1.5)
    ax.plot([left, edge, end], [left * measured.bandwidth / 1e9, top, top], color=LIGHT, linewidth=3)
    high = (left * edge**3) ** 0.25
    pictures.label(ax, "reading", (high, high * measured.bandwidth / 1e9), (-6, 4), GREY)
    pictures.label(ax, "multiplying", (end, top), (0, 5), GREY, ha="right")


def table_of(step: DecodeStep, measured: Measured) -> str:
    """Return a table of milliseconds and shares of the floor, with a column for each number of rows."""
    counts = sorted({rows for _, rows in measured.ms})
    share = floor_shares(step, measured)

    def cell(way: str, rows: int) -> str:
        return f"{measured.ms[way, rows]:.2f} ({share[way, rows]:.0%})" if (way, rows) in measured.ms else ""

    floor = [f"{1000 * step.num_bytes(rows) / measured.bandwidth:.2f}" for rows in counts]
    lines = [["", *(f"{rows} row" + "s" * (rows > 1) for rows in counts)], ["---"] * (len(counts) + 1)]
    lines += [["the floor", *floor]]
    lines += [[way, *(cell(way, rows) for rows in counts)] for way in LOOKS if (way, counts[0]) in measured.ms]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def draw_formats(
    ax: Axes,
    steps: Mapping[str, DecodeStep],
    ms: Mapping[str, Sequence[float]],
    counts: Sequence[int],
    bandwidth: float,
) -> None:
    """Draw the milliseconds of each format of the weights, and its floor. `bandwidth` is in bytes per millisecond."""
    for (name, step), (color, style, below) in zip(steps.items(), FORMAT_LOOKS, strict=True):
        floor = [step.num_bytes(rows) / bandwidth for rows in counts]
        pictures.lines(ax, [
            Line(counts, floor, "", GREY, (6, 0), "-", 0.8),
            Line(counts, ms[name], name, color, (6, below), style),
        ], "rows", "ms per step", log="x")  # fmt: skip
