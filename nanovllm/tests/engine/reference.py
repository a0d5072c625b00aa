"""The plain twin of decode attention for one token: a loop over the blocks of one sequence."""

import math

import torch
from torch import Tensor

from ...engine.kv_cache import KVCache


def attend_block_by_block(q: Tensor, kv_cache: KVCache, layer: int, block_table: list[int], context_len: int) -> Tensor:
    """Return one token's attention as in FlashAttention, to test against. q, out [num_heads, head_dim]."""
    num_kv_heads, head_dim = kv_cache.blocks.shape[-2:]
    q = q.float().view(num_kv_heads, -1, head_dim)  # [num_kv_heads, group, head_dim]
    highest = torch.full(q.shape[:2], float("-inf"), device=q.device)  # highest score so far, [num_kv_heads, group]
    total, out = (
        torch.zeros_like(highest),
        torch.zeros_like(q),
    )  # sums of exp(score - highest), without and with the values
    for i, block in enumerate(block_table[: -(-context_len // kv_cache.block_size)]):
        k, v = kv_cache.blocks[block, layer, :, : context_len - i * kv_cache.block_size].float().transpose(1, 2)
        scores = q @ k.transpose(1, 2) / math.sqrt(head_dim)  # [num_kv_heads, group, slots of the block]
        before, highest = highest, torch.maximum(highest, scores.amax(-1))
        weights, shrink = (scores - highest.unsqueeze(-1)).exp(), (before - highest).exp()
        total = total * shrink + weights.sum(-1)
        out = out * shrink.unsqueeze(-1) + weights @ v
    return (out / total.unsqueeze(-1)).flatten(0, 1)
