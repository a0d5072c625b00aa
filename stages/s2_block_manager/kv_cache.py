"""KVCache: the keys and values of all sequences. PoolReport: how much of the pool is in use."""

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from .llama import ModelConfig


class KVCache:
    """Memory for the keys and values of `num_blocks` blocks of `block_size` tokens, allocated once.

    blocks   [num_blocks, num_layers, 2, block_size, num_kv_heads, head_dim]

    A block holds the keys (0) and values (1) of its tokens in all layers, contiguously, so moving one is a single copy.
    """

    def __init__(
        self, model: ModelConfig, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.num_blocks, self.block_size = num_blocks, block_size
        shape = (num_blocks, model.num_hidden_layers, 2, block_size, model.num_key_value_heads, model.head_dim)
        self.blocks = torch.empty(shape, dtype=dtype, device=device)
        self.bytes_per_token = self.blocks.nbytes // (num_blocks * block_size)

    def write(self, layer: int, slot_mapping: Tensor, k: Tensor, v: Tensor) -> None:
        """Store token i in slot slot_mapping[i] = block * block_size + offset.

        slot_mapping int64 [num_tokens]; k, v [num_tokens, num_kv_heads, head_dim]
        """
        block, offset = slot_mapping // self.block_size, slot_mapping % self.block_size  # [num_tokens]
        self.blocks[block, layer, 0, offset] = k
        self.blocks[block, layer, 1, offset] = v

    def read(self, layer: int, block_table: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """Return copies of the keys and values in the first `length` slots of these blocks, in the order of the table.

        block_table int64 [num_blocks of the sequence] -> [length, num_kv_heads, head_dim] each
        """
        # index_select copies a block's tokens in one piece: 4 times as fast as self.blocks[block_table, layer, 0]
        keys = self.blocks[:, layer, 0].index_select(0, block_table)  # [num_blocks, block_size, num_kv_heads, head_dim]
        values = self.blocks[:, layer, 1].index_select(0, block_table)
        return keys.flatten(0, 1)[:length], values.flatten(0, 1)[:length]


@dataclass(frozen=True)
class PoolReport:
    """A snapshot of the pool, in slots.

    ####------------##--------------................
    #  used: has keys and values     -  wasted: held but empty     .  free
    """

    num_slots: int
    promised: int  # slots of the blocks that the holders would hold if each grew to max_num_tokens
    pieces: tuple[tuple[int, int, int], ...]  # (start, size, used) of each block that is held, by start

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

        >>> PoolReport(8, promised=4, pieces=((0, 4, 2),)).strip(width=8)
        '##--....'
        """
        cells = ["."] * self.num_slots
        for start, size, used in self.pieces:
            cells[start : start + size] = "#" * used + "-" * (size - used)
        edges = [i * self.num_slots // width for i in range(width + 1)]
        groups = [cells[a:b] for a, b in pairwise(edges) if b > a]
        return "".join(max("#-.", key=group.count) for group in groups)
