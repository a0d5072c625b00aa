"""One piece of memory as a paged cache, and as a contiguous one: attention of a decode step on each.

blocks of 16     [num_blocks, num_layers, 2, 16, num_kv_heads, head_dim], and a table in random order
contiguous       the same with one block for each sequence: its keys lie end to end, and the same kernel reads them
sdpa             that one too, read by torch's scaled_dot_product_attention
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ...backends.gpu import plain
from ...backends.gpu.backend import num_multiprocessors
from ...backends.gpu.ops import Ops
from ...backends.gpu.split import DecodeRoom, choose_splits
from ...checkpoints.sizes import Shape
from ...engine.block_manager import cdiv

CONTIGUOUS, SDPA = "contiguous", "sdpa"
LEAST_BYTES = 1 << 28  # of keys and values: beyond a GPU's caches
MOST_BYTES = 1 << 35
MOST_BYTES_ON_CPU = 1 << 30
MAX_DIFFERENCE = 0.03  # as a share of the largest number: bfloat16 rounds by 0.004


class Case(NamedTuple):
    """Sequences of one length, in all layers."""

    shape: Shape
    num_layers: int
    batch_size: int
    context: int
    dtype: torch.dtype
    device: torch.device

    @property
    def name(self) -> str:
        """
        >>> Case(None, 2, 8, 1024, None, None).name
        '8 x 1,024'
        """
        return f"{self.batch_size} x {self.context:,}"

    @property
    def layer_bytes(self) -> int:
        """Of the keys and values of one layer."""
        heads, size = self.shape.num_key_value_heads, self.shape.head_dim
        return 2 * self.batch_size * self.context * heads * size * self.dtype.itemsize

    def fitted(self, num_layers: int | None) -> "Case":
        """With so many layers; None: those of the shape, more of them where caches would hold these, or fewer.

        Raises ValueError if there is no room for one.
        """
        room = MOST_BYTES_ON_CPU
        if self.device.type == "cuda":
            torch.cuda.empty_cache()  # what the case before had counts as free, too
            room = min(MOST_BYTES, torch.cuda.mem_get_info(self.device)[0] // 2)
        if self.layer_bytes > room:
            raise ValueError(f"keys and values of a layer have {self.layer_bytes:,} bytes: there is room for {room:,}")
        wanted = num_layers or max(self.shape.num_hidden_layers, cdiv(LEAST_BYTES, self.layer_bytes))
        return self._replace(num_layers=min(wanted, room // self.layer_bytes))

    def memory(self) -> Tensor:
        """Random keys and values: [num_layers * layer_bytes / itemsize]"""
        count = self.num_layers * self.layer_bytes // self.dtype.itemsize
        generator = torch.Generator(self.device).manual_seed(0)
        return torch.empty(count, dtype=self.dtype, device=self.device).normal_(generator=generator)


class Way(NamedTuple):
    """A call that goes through all layers, and where it finds a sequence's keys."""

    call: Callable[[], None]
    blocks: Tensor  # [num_blocks, num_layers, 2, block_size, num_kv_heads, head_dim]
    block_tables: Tensor  # int32 [batch_size, context / block_size]


class Attention:
    """The ways on one memory. What the last layer of the last call gives stays in `out`."""

    def __init__(self, case: Case, ops: Ops) -> None:
        self._case, self._ops, self._memory = case, ops, case.memory()
        shape, device = case.shape, case.device
        heads, size = shape.num_attention_heads, shape.head_dim
        splits = choose_splits(case.batch_size, shape.num_key_value_heads, num_multiprocessors(device))
        self._room = DecodeRoom(case.batch_size, heads, size, splits, device)
        self._q = torch.randn(case.batch_size, heads, size, dtype=case.dtype, device=device)
        self._context_lens = torch.full((case.batch_size,), case.context, dtype=torch.int32, device=device)
        self.out = torch.empty_like(self._q)  # [batch_size, num_heads, head_dim]

    def paged(self, block_size: int) -> Way:
        """Each block is in a table once, in random order."""
        blocks = self._blocks(block_size)
        order = torch.randperm(len(blocks), generator=torch.Generator().manual_seed(0)).int()  # [num_blocks]
        tables = order.view(self._case.batch_size, -1).to(self._case.device)

        def call() -> None:
            for layer in range(self._case.num_layers):
                self._ops.paged_decode(self._q, blocks, layer, tables, self._context_lens, self._room, self.out)

        return Way(call, blocks, tables)

    def sdpa(self) -> Way:
        """On the contiguous cache, each sequence in its own block: the first in the first."""
        blocks, q = self._blocks(self._case.context), self._q.unsqueeze(2)  # q [batch_size, num_heads, 1, head_dim]

        def call() -> None:
            for layer in range(self._case.num_layers):
                k, v = (blocks[:, layer, i].transpose(1, 2) for i in (0, 1))  # [batch_size, num_kv_heads, context, ...]
                self.out = F.scaled_dot_product_attention(q, k, v, enable_gqa=True).squeeze(2)

        return Way(call, blocks, torch.arange(len(blocks), dtype=torch.int32, device=q.device)[:, None])

    def check(self, way: Way) -> None:
        """The first row of what its call gave, against plain operations. Raises ValueError if it is another."""
        layer, expected = self._case.num_layers - 1, torch.empty_like(self.out[:1])
        given = way.blocks, layer, way.block_tables[:1], self._context_lens[:1]
        plain.paged_decode(self._q[:1], *given, None, expected)
        difference = ((self.out[:1] - expected).abs().max() / expected.abs().max()).item()
        if not difference <= MAX_DIFFERENCE:
            raise ValueError(f"other numbers than those of plain operations, by {difference:.2g} of the largest")

    def _blocks(self, block_size: int) -> Tensor:
        """[num_blocks, num_layers, 2, block_size, num_kv_heads, head_dim]"""
        case = self._case
        heads, size = case.shape.num_key_value_heads, case.shape.head_dim
        return self._memory.view(-1, case.num_layers, 2, block_size, heads, size)
