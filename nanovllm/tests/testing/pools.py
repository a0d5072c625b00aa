"""Pools that show any read of unwritten slots, and steps on them, for tests of attention."""

import random
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from ...backends.torch.attention import AttentionMetadata, PagedAttention
from ...engine.kv_cache import KVCache
from ...llama import ModelConfig
from .reference import attend_without_cache

HEAD_DIM = 8
BLOCK_SIZE = 4
HEADS = {"every head has its own": (4, 4), "pairs share": (4, 2), "all share one": (4, 1), "one head": (1, 1)}


def model_config(num_kv_heads: int = 2, num_layers: int = 1, head_dim: int = HEAD_DIM) -> ModelConfig:
    return ModelConfig(320, 32, 48, num_layers, 4, num_kv_heads, head_dim)


def make_cache(
    num_blocks: int,
    *tables: list[int],
    num_layers: int = 1,
    block_size: int = BLOCK_SIZE,
    num_kv_heads: int = 2,
    head_dim: int = HEAD_DIM,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> KVCache:
    """Return a pool in which reads of unwritten slots show: 1e30 in the blocks of these tables, NaN elsewhere.

    A masked slot counts 0 times its contents, and 0 times NaN is NaN. In float16, 1e30 becomes 1,000, so that no score
    is infinite.
    """
    config = model_config(num_kv_heads, num_layers, head_dim)
    cache = KVCache(config, num_blocks, block_size, dtype, torch.device(device))
    cache.blocks.fill_(float("nan"))
    cache.blocks[[block for table in tables for block in table]] = 1e3 if dtype == torch.float16 else 1e30
    return cache


def random_qkv(
    num_tokens: int, num_heads: int = 4, num_kv_heads: int = 2, seed: int = 0, head_dim: int = HEAD_DIM
) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    heads = (num_heads, num_kv_heads, num_kv_heads)
    return [torch.randn(num_tokens, n, head_dim, generator=generator) for n in heads]


def slot(table: list[int], position: int, block_size: int = BLOCK_SIZE) -> int:
    return table[position // block_size] * block_size + position % block_size


def step(
    members: list[tuple[list[int], int, int]], block_size: int = BLOCK_SIZE, device: str = "cpu"
) -> AttentionMetadata:
    """Return a step for sequences of (block table, tokens computed before, tokens to compute now)."""
    width = max(len(table) for table, _, _ in members)
    slots = [slot(table, before + i, block_size) for table, before, now in members for i in range(now)]
    new_blocks = [slot // block_size for slot in slots if slot % block_size == 0]
    return AttentionMetadata(
        query_start_loc=[0, *accumulate(now for _, _, now in members)],
        context_lens=[before + now for _, before, now in members],
        block_tables=torch.tensor([t + t[-1:] * (width - len(t)) for t, _, _ in members], device=device),
        slot_mapping=torch.tensor(slots, device=device),
        new_blocks=torch.tensor(new_blocks, dtype=torch.int64, device=device),
    )


@dataclass(frozen=True)
class Batch:
    """Sequences of (tokens computed before, tokens now), with blocks scattered over a pool, and their q, k and v."""

    sizes: list[tuple[int, int]]
    block_size: int = BLOCK_SIZE
    heads: tuple[int, int] = (4, 2)  # heads, KV heads
    head_dim: int = HEAD_DIM
    seed: int = 0

    def tables(self) -> list[list[int]]:
        """Return the blocks of each sequence's tokens, and two more for every second one, like a prompt in chunks."""
        needed = [-(-(before + now) // self.block_size) + i % 2 * 2 for i, (before, now) in enumerate(self.sizes)]
        blocks = random.Random(self.seed).sample(range(sum(needed) + 3), sum(needed))
        return [[blocks.pop() for _ in range(count)] for count in needed]

    def qkv(self) -> list[list[Tensor]]:
        """Return the q, k and v of each sequence, for all its tokens."""
        seeds = range(1000 * self.seed, 1000 * self.seed + len(self.sizes))
        lengths = (before + now for before, now in self.sizes)
        return [random_qkv(n, *self.heads, i, self.head_dim) for n, i in zip(lengths, seeds, strict=True)]

    def expected(self) -> Tensor:
        """Return each sequence's own attention without a cache, in float32: [num_tokens, num_heads, head_dim]."""
        outs = [attend_without_cache(0, *qkv) for qkv in self.qkv()]
        return torch.cat([out[before:] for out, (before, _) in zip(outs, self.sizes, strict=True)])

    def attend(self, tile_size: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Tensor:
        """Return the output of one step on a pool that holds only the keys and values of earlier tokens."""
        tables, qkv, size = self.tables(), self.qkv(), self.block_size
        num_blocks = max(max(table) for table in tables) + 1
        kinds = {"block_size": size, "num_kv_heads": self.heads[1], "head_dim": self.head_dim}
        cache = make_cache(num_blocks, *tables, dtype=dtype, device=device, **kinds)
        for table, (before, _), (_, k, v) in zip(tables, self.sizes, qkv, strict=True):
            blocks, offsets = [table[i // size] for i in range(before)], [i % size for i in range(before)]
            cache.blocks[blocks, 0, 0, offsets] = k[:before].to(device, dtype)
            cache.blocks[blocks, 0, 1, offsets] = v[:before].to(device, dtype)
        attention = PagedAttention(cache, tile_size)
        members = [(table, *each) for table, each in zip(tables, self.sizes, strict=True)]
        attend = attention.plan(step(members, size, device))
        new = [[x[before:] for x in each] for each, (before, _) in zip(qkv, self.sizes, strict=True)]
        out = attend(0, *(torch.cat(xs).to(device, dtype) for xs in zip(*new, strict=True)))
        assert out.dtype == dtype
        return out.float().cpu()
