"""KVCache: the keys and values of all sequences. PoolReport: how much of the pool is in use."""

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from .llama import ModelConfig


class KVCache:
    """Memory for the keys and values of `num_slots` tokens, allocated once.

    k, v   [num_layers, num_slots, num_kv_heads, head_dim]
    """

    def __init__(self, model: ModelConfig, num_slots: int, dtype: torch.dtype, device: torch.device) -> None:
        shape = (model.num_hidden_layers, num_slots, model.num_key_value_heads, model.head_dim)
        self.k = torch.empty(shape, dtype=dtype, device=device)
        self.v = torch.empty(shape, dtype=dtype, device=device)
        self.bytes_per_token = (self.k.nbytes + self.v.nbytes) // num_slots

    def write(self, layer: int, slot_mapping: Tensor, k: Tensor, v: Tensor) -> None:
        """Store token i in slot slot_mapping[i]. k and v are [num_tokens, num_kv_heads, head_dim]."""
        self.k[layer].index_copy_(0, slot_mapping, k)
        self.v[layer].index_copy_(0, slot_mapping, v)

    def read(self, layer: int, start: int, length: int) -> tuple[Tensor, Tensor]:
        """Return keys and values of `length` slots, [length, num_kv_heads, head_dim] each: views, not copies."""
        return self.k[layer, start : start + length], self.v[layer, start : start + length]


@dataclass(frozen=True)
class PoolReport:
    """A snapshot of the pool, in slots.

    ####------------##--------------................
    #  used: has keys and values     -  wasted: held but empty     .  free
    """

    num_slots: int
    promised: int  # slots that the sequences may need in the end: prompt + max_tokens of each
    pieces: tuple[tuple[int, int, int], ...]  # (start, size, used) of each piece that is held, by start
    largest_free: int  # free slots in one piece

    @property
    def held(self) -> int:
        return sum(size for _, size, _ in self.pieces)

    @property
    def used(self) -> int:
        return sum(used for _, _, used in self.pieces)

    @property
    def wasted(self) -> int:
        return self.held - self.used

    def strip(self, width: int = 48) -> str:
        """Return a picture of the pool, `width` characters wide. Each one shows its slots' most common state.

        >>> PoolReport(8, promised=4, pieces=((0, 4, 2),), largest_free=4).strip(width=8)
        '##--....'
        """
        cells = ["."] * self.num_slots
        for start, size, used in self.pieces:
            cells[start : start + size] = "#" * used + "-" * (size - used)
        edges = [i * self.num_slots // width for i in range(width + 1)]
        groups = [cells[a:b] for a, b in pairwise(edges) if b > a]
        return "".join(max("#-.", key=group.count) for group in groups)
