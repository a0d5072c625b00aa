"""KVCache: the keys and values of all sequences. PoolReport: how much of the pool is in use."""

from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from .llama import ModelConfig


class BlockCopy(NamedTuple):
    """A block to copy, before the step writes to the source or the target."""

    source: int
    target: int


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
        self.num_blocks_copied = 0  # since the start

    def copy_blocks(self, copies: list[BlockCopy]) -> None:
        """Copy the keys and values of all layers from each source to its target, and count the copies, if any."""
        if copies:
            sources, targets = torch.tensor(copies, device=self.blocks.device).unbind(1)  # [num_copies] each
            self.blocks.index_copy_(0, targets, self.blocks.index_select(0, sources))
            self.num_blocks_copied += len(copies)

    def write(self, layer: int, slot_mapping: Tensor, k: Tensor, v: Tensor) -> None:
        """Store token i in slot slot_mapping[i] = block * block_size + offset.

        slot_mapping int64 [num_tokens]; k, v [num_tokens, num_kv_heads, head_dim]
        """
        block, offset = slot_mapping // self.block_size, slot_mapping % self.block_size  # [num_tokens]
        self.blocks[block, layer, 0, offset] = k
        self.blocks[block, layer, 1, offset] = v

    def clear(self, blocks: Tensor) -> None:
        """Zero blocks: slots past a sequence's last token are read, too, with weight 0, and 0 * NaN is NaN."""
        self.blocks.index_fill_(0, blocks, 0)

    def read(self, layer: int, blocks: Tensor) -> tuple[Tensor, Tensor]:
        """Return copies of the keys and values of each row of blocks, end to end.

        blocks int64 [num_rows, num_blocks] -> [num_rows, num_blocks * block_size, num_kv_heads, head_dim] each
        """
        keys = self.blocks[:, layer, 0].index_select(0, blocks.flatten())  # [num_rows * num_blocks, block_size, ...]
        values = self.blocks[:, layer, 1].index_select(0, blocks.flatten())
        shape = (len(blocks), -1, *keys.shape[2:])
        return keys.view(shape), values.view(shape)


@dataclass(frozen=True)
class PoolReport:
    """A snapshot of the pool, in slots.

    ####------------##--------------................
    #  used: has keys and values     -  wasted: held but empty     .  free
    """

    num_slots: int
    promised: int  # slots that the sequences in the pool would hold if each grew to max_num_tokens
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
