"""What stage 3's notebook needs: what a head asks for, the work of a step, a softmax as it grows, a roofline."""

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
    """What each head of each layer asks for the last of a sequence's tokens, by (layer, head).

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
    """What a step cannot do without, however it is written."""

    operations: float  # multiplications and additions
    num_bytes: float  # weights, keys and values, each read once

    @property
    def intensity(self) -> float:
        """Operations for each byte."""
        return self.operations / self.num_bytes


def work(model: Any, rows: Iterable[tuple[int, int]], itemsize: int) -> Work:
    """The work of a step. `rows` has for each sequence its tokens in this step and its context with them; `model` is a
    ModelConfig with a tied head, which computes the logits of each sequence's last token.
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


class Multiplying:
    """Two large matrices; a call multiplies them. `operations` says how many that takes."""

    def __init__(self, dtype: torch.dtype, size: int = 1024) -> None:
        self._a, self._b = (torch.ones(size, size, dtype=dtype) for _ in range(2))
        self.operations = 2 * size**3

    def __call__(self) -> None:
        torch.mm(self._a, self._b)


def roof(intensity: float, speed: float, bandwidth: float) -> float:
    """Operations a second that a machine allows: `speed` at most, and as many as the bytes that they need arrive.

    >>> roof(2, speed=100, bandwidth=10), roof(50, speed=100, bandwidth=10)
    (20, 100)
    """
    return min(speed, intensity * bandwidth)


# ---- pictures


def in_bytes(number: float) -> str:
    """
    >>> [in_bytes(number) for number in (512, 2048, 3 * 2**20)]
    ['512 B', '2 KB', '3 MB']
    """
    for unit, size in (("MB", 2**20), ("KB", 2**10)):
        if number >= size:
            return f"{number / size:.0f} {unit}"
    return f"{number:.0f} B"


def ticks_at(axis: Axis, values: Sequence[float], show: str = "{:,.0f}") -> None:
    """Ticks at these values and no others, each written as `show`, or as bytes if that is "bytes"."""
    axis.set_major_locator(FixedLocator(list(values)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: in_bytes(value) if show == "bytes" else show.format(value)))
    axis.set_minor_locator(NullLocator())


def growing(axes: Sequence[Axes], read: Sequence[int], panels: Mapping[str, Sequence[float]]) -> None:
    """A quantity a row against the keys read so far. A step: it is what it is until the next tile is merged. The last
    one is an error, on a scale of powers of ten.
    """
    for ax, (name, values) in zip(axes, panels.items(), strict=True):
        ax.step([0, *read], [values[0], *values], where="pre", color=USED, linewidth=1.6)
        ax.set_ylabel(name, rotation=0, ha="left", va="center")
        ax.yaxis.set_label_coords(-0.17, 0.5)
    axes[-1].set(yscale="log", xlabel="keys read", xlim=(0, read[-1]))
    axes[-1].plot(read[-1], panels[next(reversed(panels))][-1], "o", color=ACCENT, markersize=6, clip_on=False)


def in_words(name: str) -> str:
    """
    >>> in_words("prefill_32"), in_words("decode_8_128")
    ('prefill, 32 tokens', 'decode, 8 x 128')
    """
    kind, *numbers = name.split("_")
    return f"{kind}, {' x '.join(numbers)}{' tokens' if len(numbers) == 1 else ''}"


def numbered_roofline(ax: Axes, speed: float, bandwidth: float, steps: Mapping[str, tuple[Work, float]]) -> None:
    """What the machine allows, and what steps reach, in billions of operations a second. Each step, its work and the
    seconds that it takes, has a number at its mark; the names are in a list on the right.
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
