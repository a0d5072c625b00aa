"""How much a step computes and how much it must read: where it stands on a roofline (Williams et al. 2009)."""

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch


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
