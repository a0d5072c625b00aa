"""Helpers of stage 3's notebook: the queries, keys and values of each head, the work of a step, a growing softmax."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator
from torch import Tensor

from notebooks.helpers import pictures
from notebooks.helpers.pictures import ACCENT, GREY, INK, PALE, USED
from stages.bench.decode_step import Recorder
from stages.s3_paged_attention import LLM
from stages.s3_paged_attention.attention import PagedAttention
from stages.s3_paged_attention.llama import load_model
from stages.s3_paged_attention.model_runner import ModelRunner
from stages.s3_paged_attention.online_softmax import Part, attend_part


def record(llm: LLM) -> Recorder:
    """Put a recorder in front of an LLM's attention."""
    recorder, cpu = Recorder(PagedAttention(llm.kv_cache, llm.config.tile_size)), torch.device("cpu")
    model = load_model(llm.config.model, llm.model_config, llm.kv_cache.blocks.dtype, cpu)
    llm.model_runner = ModelRunner(model, recorder, llm.config.block_size, cpu)
    return recorder


def attend(q: Tensor, k: Tensor, v: Tensor) -> Part:
    """Return stage 3's attention to these keys, of one query that sees them all.

    q [1, 1, 1, head_dim]; k, v [1, 1, num_keys, head_dim]; out [1, 1, 1, 1, head_dim]
    """
    return attend_part(q.unsqueeze(2), k, v, torch.zeros(1, 1, 1, 1, k.shape[2], dtype=torch.bool))


def looks_back(asked: list[tuple[Tensor, Tensor, Tensor]]) -> dict[tuple[int, int], tuple[Tensor, Tensor, Tensor]]:
    """Return q, k and v of each (layer, head) for a sequence's last token.

    q [1, 1, 1, head_dim]; k, v [1, 1, num_tokens, head_dim]
    """
    looks = {}
    for layer, (q, k, v) in enumerate(asked):
        group = q.shape[1] // k.shape[1]
        for head in range(q.shape[1]):
            looks[layer, head] = tuple(x[None, None] for x in (q[-1:, head], k[:, head // group], v[:, head // group]))
    return looks


# ---- the work of a step


class Work(NamedTuple):
    """The least work of a step, however it is written."""

    operations: float  # multiplications and additions
    num_bytes: float  # weights, keys and values, each read once

    @property
    def intensity(self) -> float:
        """Return the operations per byte."""
        return self.operations / self.num_bytes


def work(model: Any, rows: Iterable[tuple[int, int]], itemsize: int) -> Work:
    """Return the work of a step.

    `rows` has (tokens in this step, context with them) of each sequence. `model` is a ModelConfig with a tied head,
    which computes the logits of each sequence's last token.
    """
    rows = list(rows)
    num_tokens = sum(tokens for tokens, _ in rows)
    queries, kv = (heads * model.head_dim for heads in (model.num_attention_heads, model.num_key_value_heads))
    layer = model.hidden_size * (2 * queries + 2 * kv + 3 * model.intermediate_size)  # weights
    head = model.hidden_size * model.vocab_size
    seen = sum(tokens * context - tokens * (tokens - 1) / 2 for tokens, context in rows)  # keys, of all queries
    operations = model.num_hidden_layers * (2 * layer * num_tokens + 4 * queries * seen) + 2 * head * len(rows)
    numbers = model.num_hidden_layers * (layer + 2 * kv * sum(context for _, context in rows)) + head
    return Work(operations, itemsize * numbers)


def roof(intensity: float, speed: float, bandwidth: float) -> float:
    """Return the most operations per second: `speed`, or fewer if their bytes do not arrive in time.

    >>> roof(2, speed=100, bandwidth=10), roof(50, speed=100, bandwidth=10)
    (20, 100)
    """
    return min(speed, intensity * bandwidth)


# ---- pictures


def in_bytes(number: float) -> str:
    """Write a number of bytes with a suitable unit.

    >>> [in_bytes(number) for number in (512, 2048, 3 * 2**20)]
    ['512 B', '2 KB', '3 MB']
    """
    for unit, size in (("MB", 2**20), ("KB", 2**10)):
        if number >= size:
            return f"{number / size:.0f} {unit}"
    return f"{number:.0f} B"


def ticks_at(axis: Axis, values: Sequence[float], show: str = "{:,.0f}") -> None:
    """Put ticks at these values alone, formatted with `show`. "bytes" writes them as bytes."""
    axis.set_major_locator(FixedLocator(list(values)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: in_bytes(value) if show == "bytes" else show.format(value)))
    axis.set_minor_locator(NullLocator())


def growing(axes: Sequence[Axes], read: Sequence[int], panels: Mapping[str, Sequence[float]]) -> None:
    """Draw each quantity against the keys read so far. The last one is an error, on a logarithmic scale."""
    for ax, (name, values) in zip(axes, panels.items(), strict=True):
        ax.step([0, *read], [values[0], *values], where="pre", color=USED, linewidth=1.6)
        ax.set_ylabel(name, rotation=0, ha="left", va="center")
        ax.yaxis.set_label_coords(-0.17, 0.5)
    axes[-1].set(yscale="log", xlabel="keys read", xlim=(0, read[-1]))
    axes[-1].plot(read[-1], panels[next(reversed(panels))][-1], "o", color=ACCENT, markersize=6, clip_on=False)


def in_words(name: str) -> str:
    """Write the name of a step in words.

    >>> in_words("prefill_32"), in_words("decode_8_128")
    ('prefill, 32 tokens', 'decode, 8 x 128')
    """
    kind, *numbers = name.split("_")
    return f"{kind}, {' x '.join(numbers)}{' tokens' if len(numbers) == 1 else ''}"


def numbered_roofline(ax: Axes, speed: float, bandwidth: float, steps: Mapping[str, tuple[Work, float]]) -> None:
    """Draw the roof of a machine and the speed of each step, in billions of operations per second.

    `steps` has the work of each step and its seconds. Numbers mark the steps; a list on the right has their names.
    """
    every = [work.intensity for work, _ in steps.values()]
    low, high, ridge = min(every) / 2, max(every) * 2, speed / bandwidth
    ax.plot([low, ridge, high], [roof(x, speed, bandwidth) / 1e9 for x in (low, ridge, high)], color=INK, linewidth=1.6)
    ax.axvline(ridge, color=PALE, linewidth=1, zorder=0)
    for number, (name, (work, seconds)) in enumerate(steps.items(), start=1):
        mark, color = ("s", ACCENT) if name.startswith("prefill") else ("o", USED)
        x, y = work.intensity, work.operations / seconds / 1e9
        ax.plot([x, x], [y, roof(x, speed, bandwidth) / 1e9], ":", color=GREY, linewidth=0.8)
        ax.plot(x, y, mark, color=color, markersize=12)
        ax.text(x, y, str(number), ha="center", va="center", color="white", fontsize=8)
        at = (1.02, 0.98 - 0.11 * (number - 1))
        ax.text(*at, f"{number}  {in_words(name)}", transform=ax.transAxes, va="top", color=pictures.darker(color))
    slowest = min(work.operations / seconds for work, seconds in steps.values()) / 1e9
    ax.set(xscale="log", yscale="log", xlim=(low, high), ylim=(slowest / 2, 2 * speed / 1e9))
    ax.set(xlabel="operations for each byte that must be read", ylabel="billion operations a second")
    pictures.label(ax, f"memory: {bandwidth / 1e9:.0f} GB/s", (low, low * bandwidth / 1e9), (4, 16), INK)
    pictures.label(ax, f"arithmetic: {speed / 1e9:,.0f} billion/s", (high, speed / 1e9), (-4, 4), INK)
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
        axis.set_minor_locator(NullLocator())
