"""Attention over blocks: the keys of a sequence are gathered into one piece, and then read."""

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from .kv_cache import KVCache
from .llama import Attend


@dataclass(frozen=True)
class AttentionMetadata:
    """The tokens of a step: sequence i has rows query_start_loc[i] .. query_start_loc[i + 1] - 1."""

    query_start_loc: list[int]  # [num_seqs + 1]
    context_lens: list[int]  # [num_seqs], including the tokens of this step
    block_tables: list[Tensor]  # int64 [num_blocks of the sequence] for each sequence
    slot_mapping: Tensor  # int64 [num_tokens], slot of each token


class GatherAttention:
    """The attention backend: plan() returns the `attend` of one step."""

    def __init__(self, kv_cache: KVCache) -> None:
        self._kv_cache = kv_cache

    def plan(self, step: AttentionMetadata) -> Attend:
        return partial(self._attend, step)

    def _attend(self, step: AttentionMetadata, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Store the keys and values of this step, then attend sequence by sequence.

        q, out [num_tokens, num_heads, head_dim]; k, v [num_tokens, num_kv_heads, head_dim]
        """
        self._kv_cache.write(layer, step.slot_mapping, k, v)
        out = torch.empty_like(q)
        for i, (block_table, context_len) in enumerate(zip(step.block_tables, step.context_lens, strict=True)):
            rows = slice(step.query_start_loc[i], step.query_start_loc[i + 1])
            keys, values = self._kv_cache.read(layer, block_table, context_len)  # [context_len, num_kv_heads, head_dim]
            out[rows] = attend_one(q[rows], keys, values)
        return out


def attend_one(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attend in one sequence: for its whole prompt (prefill), or for its newest token (decode).

    q, out [query_len, num_heads, head_dim]; k, v [context_len, num_kv_heads, head_dim]
    """
    query_len, num_heads, head_dim = q.shape
    num_kv_heads = k.shape[1]
    assert query_len in (1, len(k)), f"{query_len} queries on {len(k)} keys: a prompt is computed whole"
    k, v = (x.transpose(0, 1).unsqueeze(0) for x in (k, v))  # [1, num_kv_heads, context_len, head_dim]
    if query_len == 1:
        # One query sees all keys, so the query heads of a KV head can be the query axis: faster than enable_gqa.
        q = q.reshape(1, num_kv_heads, num_heads // num_kv_heads, head_dim)
        return F.scaled_dot_product_attention(q, k, v).reshape(1, num_heads, head_dim)
    q = q.transpose(0, 1).unsqueeze(0)  # [1, num_heads, query_len, head_dim]
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=num_heads != num_kv_heads)
    return out.squeeze(0).transpose(0, 1)
