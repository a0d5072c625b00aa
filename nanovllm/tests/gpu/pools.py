"""Pools for the kernels' tests: sequences in random blocks, and NaN wherever nothing was written."""

from typing import NamedTuple

import torch
from torch import Tensor

# How far a kernel may be from its twin, which computes in float32: weights and results are rounded to the dtype.
TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}


class Shape(NamedTuple):
    """What a kernel is compiled for."""

    num_kv_heads: int
    group: int  # query heads of a KV head
    head_dim: int
    block_size: int
    dtype: torch.dtype


class Pool(NamedTuple):
    blocks: Tensor  # [num_blocks, num_layers, 2, block_size, num_kv_heads, head_dim]
    block_tables: Tensor  # int32 [num_seqs, max_blocks], behind a sequence's blocks a number that is no block's
    context_lens: Tensor  # int32 [num_seqs]


def make_pool(shape: Shape, context_lens: list[int], layer: int, device: str, seed: int) -> Pool:
    """A pool of layer + 2 layers that has these contexts in `layer`, and NaN elsewhere."""
    generator = torch.Generator().manual_seed(seed)
    needs = [-(-context_len // shape.block_size) for context_len in context_lens]
    order = torch.randperm(sum(needs) + 2, generator=generator).tolist()
    block_tables = torch.full((len(context_lens), max(needs) + 1), 2**30, dtype=torch.int32)
    size = (len(order), layer + 2, 2, shape.block_size, shape.num_kv_heads, shape.head_dim)
    blocks = torch.full(size, torch.nan, dtype=shape.dtype)
    for seq, context_len in enumerate(context_lens):
        table = [order.pop() for _ in range(needs[seq])]
        block_tables[seq, : len(table)] = torch.tensor(table, dtype=torch.int32)
        for position in range(context_len):
            block, offset = table[position // shape.block_size], position % shape.block_size
            kv = torch.randn(2, shape.num_kv_heads, shape.head_dim, generator=generator)
            blocks[block, layer, :, offset] = kv.to(shape.dtype)
    lengths = torch.tensor(context_lens, dtype=torch.int32)
    return Pool(blocks.to(device), block_tables.to(device), lengths.to(device))


def make_queries(shape: Shape, rows: int, device: str, seed: int) -> Tensor:
    """[rows, num_heads, head_dim]"""
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(rows, shape.num_kv_heads * shape.group, shape.head_dim, generator=generator)
    return q.to(device, shape.dtype)
