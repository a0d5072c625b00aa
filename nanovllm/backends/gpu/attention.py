"""The attention backend: what of a step is the same in all layers is worked out once, and brought to the device."""

from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from ..torch.attention import AttentionMetadata
from .ops import Ops
from .split import DecodeRoom, choose_splits, query_tiles

if TYPE_CHECKING:
    from ...engine.kv_cache import KVCache


class Decodes(NamedTuple):
    """Sequences with one query each."""

    rows: Tensor | None  # int64 [num_decodes], of the step; None: all rows, in their order
    block_tables: Tensor  # int32 [num_decodes, max_blocks]
    context_lens: Tensor  # int32 [num_decodes]
    room: DecodeRoom


class Chunks(NamedTuple):
    """Sequences with several queries."""

    block_tables: Tensor  # int32 [num_seqs, max_blocks], of all sequences of the step
    query_start_loc: Tensor  # int32 [num_seqs + 1]
    context_lens: Tensor  # int32 [num_seqs]
    tiles: Tensor  # int32 [num_tiles, 2], a sequence and a row each


class Pool(NamedTuple):
    """Everything that stays the same in all steps."""

    ops: Ops
    blocks: Tensor  # [num_blocks, num_layers, 2, block_size, num_kv_heads, head_dim]
    num_heads: int
    cos: Tensor  # [max_model_len, head_dim], in the pool's type, as sin
    sin: Tensor
    num_sms: int  # multiprocessors of the device

    def decode_room(self, rows: int) -> DecodeRoom:
        num_kv_heads, head_dim = self.blocks.shape[4:]
        splits = choose_splits(rows, num_kv_heads, self.num_sms)
        return DecodeRoom(rows, self.num_heads, head_dim, splits, self.blocks.device)


class KernelAttend:
    """The `attend` of one step, for FusedModel: it takes queries, keys and values as the projection leaves them."""

    def __init__(self, pool: Pool, slot_mapping: Tensor, decodes: Decodes | None, chunks: Chunks | None) -> None:
        """slot_mapping int64 [num_tokens], -1 for a row of padding"""
        self._pool, self._slot_mapping, self._decodes, self._chunks = pool, slot_mapping, decodes, chunks

    def __call__(self, layer: int, qkv: Tensor, positions: Tensor, q_norm: nn.Module, k_norm: nn.Module) -> Tensor:
        """Keys and values are written first: a chunk's own are read from the pool, too.

        qkv [num_tokens, num_heads + 2 * num_kv_heads, head_dim]; positions int64 [num_tokens];
        q_norm, k_norm: of the heads, or None -> [num_tokens, num_heads, head_dim]
        """
        ops, blocks, num_heads, cos, sin, _ = self._pool
        q = qkv.new_empty(len(qkv), num_heads, qkv.shape[2])
        weights, eps = (q_norm and q_norm.weight, k_norm and k_norm.weight), q_norm.eps if q_norm else 0.0
        ops.rotate_and_write(qkv, cos, sin, positions, self._slot_mapping, blocks, layer, *weights, eps, q)
        out = torch.empty_like(q)
        if self._chunks:
            tables, starts, lens, tiles = self._chunks
            ops.paged_prefill(q, blocks, layer, tables, starts, lens, tiles, out)
        if self._decodes:
            rows, tables, lens, room = self._decodes
            if rows is None:
                ops.paged_decode(q, blocks, layer, tables, lens, room, out)
            else:
                decoded = q.index_select(0, rows)  # [num_decodes, num_heads, head_dim]
                ops.paged_decode(decoded, blocks, layer, tables, lens, room, attended := torch.empty_like(decoded))
                out.index_copy_(0, rows, attended)
        return out


class KernelAttention:
    """The attention backend: plan() returns the `attend` of one step of any mixture.

    Kernels never read what was not written: no block is cleared.
    """

    def __init__(self, pool: Pool, kv_cache: "KVCache") -> None:
        self._pool, self._block_size = pool, kv_cache.block_size

    def plan(self, step: AttentionMetadata) -> KernelAttend:
        query_lens = [end - start for start, end in pairwise(step.query_start_loc)]
        decodes = [i for i, query_len in enumerate(query_lens) if query_len == 1]
        chunks = [i for i, query_len in enumerate(query_lens) if query_len > 1]
        tables = step.block_tables.int()
        return KernelAttend(
            self._pool, step.slot_mapping, self._decodes(step, decodes, tables), self._chunks(step, chunks, tables)
        )

    def _decodes(self, step: AttentionMetadata, seqs: list[int], tables: Tensor) -> Decodes | None:
        if not seqs:
            return None
        lens, room = self._tensor([step.context_lens[i] for i in seqs]), self._pool.decode_room(len(seqs))
        if len(seqs) == len(step.context_lens):
            return Decodes(None, tables, lens, room)
        rows = self._tensor([step.query_start_loc[i] for i in seqs]).long()
        return Decodes(rows, tables.index_select(0, self._tensor(seqs)), lens, room)

    def _chunks(self, step: AttentionMetadata, seqs: list[int], tables: Tensor) -> Chunks | None:
        if not seqs:
            return None
        group = self._pool.num_heads // self._pool.blocks.shape[4]
        tiles = query_tiles(step.query_start_loc, seqs, group)
        starts, lens = self._tensor(step.query_start_loc), self._tensor(step.context_lens)
        return Chunks(tables, starts, lens, self._tensor(tiles))

    def _tensor(self, values: list) -> Tensor:
        device = self._pool.blocks.device
        host = torch.tensor(values, dtype=torch.int32, pin_memory=device.type == "cuda")
        return host.to(device, non_blocking=True)
