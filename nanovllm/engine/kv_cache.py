"""KVCache: the keys and values of all sequences. PoolReport: how much of the pool is in use."""

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from ..checkpoints.sizes import kv_bytes_per_token
from ..host_memory import allocate, use_huge_pages
from ..llama import ModelConfig
from .int8_blocks import Int8Blocks, int8_block_shape

FP8, MAX_FP8 = torch.float8_e4m3fn, 448  # a sign, 4 bits of exponent and 3 of fraction


class BlockCopy(NamedTuple):
    """A block to copy, before the step writes to the source or the target."""

    source: int
    target: int


class KVCache:
    """Memory for the keys and values of `num_blocks` blocks of `block_size` tokens, allocated once.

    blocks   [num_blocks, num_layers, 2, block_size, num_kv_heads, head_dim]

    A block holds the keys (0) and values (1) of its tokens in all layers, contiguously, so moving a block is a single
    copy. Numbers of 8 bits are stored as bytes, uint8: fp8 (float8_e4m3fn) in the same shape, and int8 in the layout
    that int8_blocks.py describes.
    """

    def __init__(
        self,
        model: ModelConfig,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        kv_cache_dtype: str = "auto",
    ) -> None:
        """Allocate the pool. write() takes and read() returns `dtype`, even if blocks store "int8" or "fp8"."""
        self.num_blocks, self.block_size, self.dtype = num_blocks, block_size, dtype
        self.is_int8, self.is_fp8 = kv_cache_dtype == "int8", kv_cache_dtype == "fp8"
        self.stored_as = kv_cache_dtype if self.is_int8 or self.is_fp8 else str(dtype).removeprefix("torch.")
        self.num_layers, self.num_kv_heads = model.num_hidden_layers, model.num_key_value_heads
        self.head_dim = model.head_dim
        shape: tuple[int, ...] = (self.num_layers, 2, block_size, self.num_kv_heads, self.head_dim)
        if self.is_int8:
            shape = int8_block_shape(model, block_size)
        stored = torch.uint8 if self.is_int8 or self.is_fp8 else dtype
        try:
            self.blocks = allocate((num_blocks, *shape), stored, device)
        except RuntimeError:
            size = num_blocks * block_size * kv_bytes_per_token(model, dtype.itemsize, kv_cache_dtype)
            raise ValueError(f"{device} has no room for a pool of {num_blocks:,} blocks, {size:,} bytes") from None
        use_huge_pages(self.blocks)
        self._int8 = Int8Blocks(self.blocks, block_size, self.head_dim) if self.is_int8 else None
        # Two views of a pool that is not int8. In a layer, the key (kv = 0) or the value (1) of a slot is row number
        # ((block * num_layers + layer) * 2 + kv) * block_size + offset; all keys or values of a block are piece number
        # (block * num_layers + layer) * 2 + kv.
        self._rows = self.blocks.view(-1, *shape[3:])  # [num_blocks * num_layers * 2 * block_size, num_kv_heads, ...]
        self._pieces = self.blocks.view(-1, *shape[2:])  # [num_blocks * num_layers * 2, block_size, num_kv_heads, ...]
        self.bytes_per_token = self.blocks.nbytes // (num_blocks * block_size)
        self.num_blocks_copied = 0  # since the start

    @property
    def numbers(self) -> Tensor:
        """`blocks` with the type of what they store: bytes of fp8 are FP8. Only int8, which has scales, stays uint8."""
        return self.blocks.view(FP8) if self.is_fp8 else self.blocks

    def copy_blocks(self, copies: list[BlockCopy]) -> None:
        """Copy the keys and values of all layers from each source to its target, and count the copies, if any."""
        if copies:
            sources, targets = torch.tensor(copies, device=self.blocks.device).unbind(1)  # [num_copies] each
            self.blocks.index_copy_(0, targets, self.blocks.index_select(0, sources))
            self.num_blocks_copied += len(copies)

    def rows(self, slot_mapping: Tensor) -> Tensor:
        """Return the row numbers of these slots in layer 0: those of all keys, then those of all values.

        slot_mapping int64 [num_tokens], a slot is block * block_size + offset -> int64 [2 * num_tokens]
        With int8, return the slots.
        """
        if self._int8:
            return slot_mapping
        block, offset = slot_mapping // self.block_size, slot_mapping % self.block_size  # [num_tokens]
        keys = block * (len(self._rows) // self.num_blocks) + offset  # [num_tokens]
        return torch.cat((keys, keys + self.block_size))

    def write(self, layer: int, rows: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Store the key and value of each token i in slot slot_mapping[i]; `rows` is rows(slot_mapping).

        Return them as read() would: in 8 bits, rounded.

        k, v [num_tokens, num_kv_heads, head_dim]
        """
        if self._int8:
            return self._int8.write(layer, rows, k, v)
        assert k.shape == v.shape == (len(rows) // 2, *self._rows.shape[1:]), (k.shape, v.shape, rows.shape)
        both = torch.cat((k, v))
        if self.is_fp8:
            both = to_fp8(both).view(torch.uint8)
            k, v = self._numbers(both).chunk(2)
        self._rows.index_copy_(0, rows + layer * 2 * self.block_size, both)
        return k, v

    def clear(self, blocks: Tensor) -> None:
        """Zero these blocks: slots past a sequence's last token are read, too, with weight 0, and 0 * NaN is NaN."""
        self.blocks.index_fill_(0, blocks, 0)

    def pieces(self, blocks: Tensor) -> Tensor:
        """Return the piece numbers of these blocks in layer 0: in each row, all keys come before all values.

        read() copies in this order, so the CPU core that copied a sequence's keys and values finds them in its own
        cache when it attends to them.
        blocks int64 [..., num_blocks] -> int64 [..., 2 * num_blocks]
        With int8, return the blocks.
        """
        if self._int8:
            return blocks
        keys = blocks * (len(self._pieces) // self.num_blocks)  # [..., num_blocks]
        return torch.cat((keys, keys + 1), dim=-1)

    def read(self, layer: int, pieces: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """Return copies of the keys and values in the first `length` slots of each row of blocks.

        A row with fewer slots gives all of them.

        pieces int64 [..., 2 * num_blocks], from pieces() -> [..., length, num_kv_heads, head_dim] each
        """
        if self._int8:
            k, v = self._int8.read(layer, pieces, self.dtype)
            return k[..., :length, :, :], v[..., :length, :, :]
        stored = self._pieces.index_select(0, pieces.flatten() + layer * 2)  # [all pieces, block_size, ...]
        copied = self._numbers(stored)
        k, v = copied.view(*pieces.shape[:-1], 2, -1, *copied.shape[2:]).unbind(-4)  # [..., slots, ...] each
        return k[..., :length, :, :], v[..., :length, :, :]

    def _numbers(self, stored: Tensor) -> Tensor:
        return stored.view(FP8).to(self.dtype) if self.is_fp8 else stored


def to_fp8(numbers: Tensor) -> Tensor:
    """Round to FP8, and what is too large to the largest number that it has.

    >>> to_fp8(torch.tensor([1.05, -1e6])).float()
    tensor([   1., -448.])
    """
    return numbers.clamp(-MAX_FP8, MAX_FP8).to(FP8)


@dataclass(frozen=True)
class PoolReport:
    """A snapshot of the pool, in slots. It is made while requests run, so it looks at each block only if it is asked.

    ####------------##--------------................
    #  used: has keys and values     -  wasted: held but empty     .  free
    """

    num_slots: int
    held: int  # by sequences and loads
    promised: int  # slots that the sequences in the pool would hold if each grew to max_num_tokens
    block_size: int
    tables: list[tuple[list[int], int]]  # the blocks of each sequence, and the number of its computed tokens

    @cached_property
    def pieces(self) -> tuple[tuple[int, int, int], ...]:
        """The blocks that sequences hold, as (start, size, used), in order."""
        size = self.block_size
        pieces = {
            (block * size, size, min(max(num_computed - i * size, 0), size))
            for table, num_computed in self.tables
            for i, block in enumerate(table)
        }
        return tuple(sorted(pieces))

    @cached_property
    def used(self) -> int:
        return sum(used for _, _, used in self.pieces)

    def strip(self, width: int = 48) -> str:
        """Return a picture of the pool, `width` characters wide. Each one shows its slots' most common state.

        >>> PoolReport(8, held=4, promised=4, block_size=4, tables=[([0], 2)]).strip(width=8)
        '##--....'
        """
        cells = ["."] * self.num_slots
        for start, size, used in self.pieces:
            cells[start : start + size] = "#" * used + "-" * (size - used)
        edges = [i * self.num_slots // width for i in range(width + 1)]
        groups = [cells[a:b] for a, b in pairwise(edges) if b > a]
        return "".join(max("#-.", key=group.count) for group in groups)
