"""The `attend` of this stage: a sequence's keys lie in blocks, so they are first gathered into one piece, then read."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from .kv_cache import KVCache


@dataclass(frozen=True)
class AttentionMetadata:
    """What a step's tokens are: sequence i has rows query_start_loc[i] .. query_start_loc[i + 1] - 1."""

    query_start_loc: list[int]  # [num_seqs + 1]
    context_lens: list[int]  # [num_seqs], this step's tokens counted
    block_tables: list[Tensor]  # int64 [blocks of the sequence] for each
    slot_mapping: Tensor  # int64 [num_tokens], the slot of each row


class GatherAttention:
    """The attention backend: plan() makes the `attend` of a step. One object for the life of an engine."""

    def __init__(self, kv_cache: KVCache) -> None:
        self._kv_cache = kv_cache

    def plan(self, step: AttentionMetadata) -> "GatherAttend":
        return GatherAttend(self._kv_cache, step)


class GatherAttend:
    """The `attend` of one step: stores its keys and values, then attends sequence by sequence."""

    def __init__(self, kv_cache: KVCache, step: AttentionMetadata) -> None:
        self._kv_cache = kv_cache
        self._step = step
        self._rows = kv_cache.rows(step.slot_mapping)  # [2 * num_tokens]
        self._pieces = [kv_cache.pieces(table) for table in step.block_tables]

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q, out [num_tokens, num_heads, head_dim]; k, v [num_tokens, num_kv_heads, head_dim]"""
        step = self._step
        assert q.shape[0] == step.query_start_loc[-1], f"{q.shape[0]} queries, the step has {step.query_start_loc[-1]}"
        self._kv_cache.write(layer, self._rows, k, v)
        outs = []
        for i, (pieces, context_len) in enumerate(zip(self._pieces, step.context_lens, strict=True)):
            rows = slice(step.query_start_loc[i], step.query_start_loc[i + 1])
            keys, values = self._kv_cache.read(layer, pieces, context_len)  # [context_len, num_kv_heads, head_dim]
            outs.append(attend_one(q[rows], keys, values))
        return torch.cat(outs)


def attend_one(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention of one sequence: a whole prompt, or its newest token.

    q, out [query_len, num_heads, head_dim]; k, v [context_len, num_kv_heads, head_dim]
    """
    query_len, num_heads, head_dim = q.shape
    context_len, num_kv_heads, _ = k.shape
    k, v = (x.transpose(0, 1).unsqueeze(0) for x in (k, v))  # [1, num_kv_heads, context_len, head_dim]
    if query_len == 1:
        # One query sees every key, so the heads that share a KV head can be the query axis: faster than enable_gqa.
        q = q.reshape(1, num_kv_heads, num_heads // num_kv_heads, head_dim)
        return F.scaled_dot_product_attention(q, k, v).reshape(1, num_heads, head_dim)
    assert query_len == context_len, f"{query_len} queries on {context_len} keys: a prompt is computed whole"
    q = q.transpose(0, 1).unsqueeze(0)  # [1, num_heads, query_len, head_dim]
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=num_heads != num_kv_heads)
    return out.squeeze(0).transpose(0, 1)
