"""Inputs for tests of attention kernels: sequences in random blocks of a pool, with NaN in every unwritten slot."""

from typing import NamedTuple

import torch
from torch import Tensor

from ...backends.gpu.plain import DecodeMetadata
from ...backends.gpu.tiles import DecodeWorkspace
from ...engine.int8_blocks import Int8Blocks
from ...engine.kv_cache import to_fp8

# How far a kernel's result may be from its plain version's, which works in float32 and rounds at the end
TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
DTYPES = list(TOLERANCE)


class KernelShape(NamedTuple):
    """The constants that an attention kernel is compiled for."""

    num_kv_heads: int
    group: int  # query heads per KV head
    head_dim: int
    block_size: int
    dtype: torch.dtype
    kv_cache_dtype: str = "auto"


class FilledPool(NamedTuple):
    """A pool, and the sequences in it."""

    blocks: Tensor  # as KVCache.numbers
    block_tables: Tensor  # int32 [num_seqs, max_blocks], with an invalid block number past a sequence's end
    context_lens: Tensor  # int32 [num_seqs]


def make_pool(shape: KernelShape, context_lens: list[int], layer: int, device: str, seed: int) -> FilledPool:
    """Build a pool of layer + 2 layers with random keys and values of these contexts in `layer`."""
    generator = torch.Generator().manual_seed(seed)
    num_blocks = [-(-context_len // shape.block_size) for context_len in context_lens]
    order = torch.randperm(sum(num_blocks) + 2, generator=generator).tolist()
    block_tables = torch.full((len(context_lens), max(num_blocks) + 1), 2**30, dtype=torch.int32)
    size = (len(order), layer + 2, 2, shape.block_size, shape.num_kv_heads, shape.head_dim)
    blocks = torch.full(size, torch.nan, dtype=shape.dtype)
    for seq, context_len in enumerate(context_lens):
        table = [order.pop() for _ in range(num_blocks[seq])]
        block_tables[seq, : len(table)] = torch.tensor(table, dtype=torch.int32)
        for position in range(context_len):
            block, offset = table[position // shape.block_size], position % shape.block_size
            kv = torch.randn(2, shape.num_kv_heads, shape.head_dim, generator=generator)
            blocks[block, layer, :, offset] = kv.to(shape.dtype)
    lengths = torch.tensor(context_lens, dtype=torch.int32)
    return FilledPool(as_stored(blocks, shape.kv_cache_dtype).to(device), block_tables.to(device), lengths.to(device))


def as_stored(blocks: Tensor, kv_cache_dtype: str) -> Tensor:
    """Return a pool of numbers as KVCache.numbers stores them. NaN stays NaN.

    blocks [num_blocks, num_layers, 2, block_size, num_kv_heads, head_dim]
    """
    if kv_cache_dtype == "fp8":
        return to_fp8(blocks)
    if kv_cache_dtype != "int8":
        return blocks
    num_blocks, num_layers, _, block_size, num_kv_heads, head_dim = blocks.shape
    shape = num_blocks, num_layers, num_kv_heads, block_size * (2 * head_dim + 8)
    stored = torch.full(shape, 255, dtype=torch.uint8)  # NaN in each scale
    writer = Int8Blocks(stored, block_size, head_dim)
    for layer in range(num_layers):
        k, v = blocks[:, layer].transpose(0, 1).flatten(1, 2)  # [num_slots, num_kv_heads, head_dim] each
        slots = (~k.isnan()).all(-1).all(-1).nonzero()[:, 0]
        writer.write(layer, slots, k[slots], v[slots])
    return stored


def decodes_of(
    block_tables: Tensor, context_lens: Tensor, workspace: DecodeWorkspace, order: list[int] | None = None
) -> DecodeMetadata:
    """Return a step in which row i has table i and context i. Programs take rows in this order, by default from 0."""
    numbers = torch.tensor(order or [*range(len(context_lens))], dtype=torch.int32, device=context_lens.device)
    return DecodeMetadata(block_tables, context_lens[numbers.long()], workspace, numbers, numbers)


def make_queries(shape: KernelShape, rows: int, device: str, seed: int) -> Tensor:
    """Return random queries, [rows, num_heads, head_dim]."""
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(rows, shape.num_kv_heads * shape.group, shape.head_dim, generator=generator)
    return q.to(device, shape.dtype)


def pick(generator: torch.Generator, *choices: int) -> int:
    return choices[int(torch.randint(len(choices), (1,), generator=generator))]


def random_shape(generator: torch.Generator, dtype: torch.dtype) -> KernelShape:
    sizes = (1, 2, 3), (1, 2, 3, 4, 5, 6, 7, 8), (8, 16, 24, 64, 80, 128), (1, 3, 16, 128)
    num_kv_heads, group, head_dim, block_size = (pick(generator, *each) for each in sizes)
    fits_int8 = head_dim % 16 == block_size % 4 == 0
    kv_cache_dtype = ("auto", "fp8", "int8" if fits_int8 else "auto")[pick(generator, 0, 1, 2)]
    return KernelShape(num_kv_heads, group, head_dim, block_size, dtype, kv_cache_dtype)
