"""The attention backend. Values that all layers share are computed and copied to the device once per step."""

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from ...llama.model import RMSNorm
from ..torch.attention import AttentionMetadata
from .ops import Ops
from .plain import DecodeMetadata, PoolSizes, PrefillMetadata
from .tiles import DecodeWorkspace, choose_splits, queries_per_tile, query_tiles


class KernelContext(NamedTuple):
    """The kernel arguments that are the same in every step."""

    ops: Ops
    blocks: Tensor  # the pool: KVCache.numbers
    pool: PoolSizes
    num_heads: int
    cos: Tensor  # [max_model_len, head_dim], in the model's dtype
    sin: Tensor  # same shape as cos
    num_sms: int  # multiprocessors of the device
    prefill_rows: int  # rows per program of paged_prefill(), one of PREFILL_ROWS

    def decode_workspace(self, rows: int) -> DecodeWorkspace:
        """Allocate the workspace for a step that decodes `rows` sequences."""
        splits = choose_splits(rows, self.pool.num_kv_heads, self.num_sms)
        return DecodeWorkspace(rows, self.num_heads, self.cos.shape[1], splits, self.blocks.device)


class KernelAttend:
    """The `attend` function of a step. It takes the output of qkv_proj before norm and rotation, and applies both."""

    def __init__(
        self,
        context: KernelContext,
        slot_mapping: Tensor,
        decodes: DecodeMetadata | None,
        prefills: PrefillMetadata | None,
    ) -> None:
        """Prepare a step. `slot_mapping` is int64 [num_tokens], -1 for a padding row."""
        self._context, self._slot_mapping, self._decodes, self._prefills = context, slot_mapping, decodes, prefills

    def __call__(
        self, layer: int, qkv: Tensor, positions: Tensor, q_norm: RMSNorm | None, k_norm: RMSNorm | None
    ) -> Tensor:
        """Write keys and values to the pool, then return the attention of all rows, [num_tokens, num_heads, head_dim].

        The write comes first because a chunk attends to its own keys through the pool.

        qkv [num_tokens, num_heads + 2 * num_kv_heads, head_dim]; positions int64 [num_tokens]
        """
        ops, blocks, _, num_heads, cos, sin, *_ = self._context
        q = qkv.new_empty(len(qkv), num_heads, qkv.shape[2])
        weights = [norm and norm.weight for norm in (q_norm, k_norm)]
        eps = q_norm.eps if q_norm else 0.0
        ops.rotate_and_write(qkv, cos, sin, positions, self._slot_mapping, blocks, layer, *weights, eps, q)
        out = torch.empty_like(q)
        if self._prefills:
            ops.paged_prefill(q, blocks, layer, self._prefills, out)
        if self._decodes:
            ops.paged_decode(q, blocks, layer, self._decodes, out)
        return out


class KernelAttention:
    """The attention backend: plan() returns the `attend` function of a step, for any mix of prefills and decodes.

    Kernels never read a slot before it is written, so new blocks are not cleared.
    """

    def __init__(self, context: KernelContext) -> None:
        self._context = context

    def plan(self, step: AttentionMetadata) -> KernelAttend:
        query_lens = [end - start for start, end in pairwise(step.query_start_loc)]
        decodes = [i for i, query_len in enumerate(query_lens) if query_len == 1]
        prefills = [i for i, query_len in enumerate(query_lens) if query_len > 1]
        tables = step.block_tables.int()
        decode, prefill = self._decode_metadata(step, decodes, tables), self._prefill_metadata(step, prefills, tables)
        return KernelAttend(self._context, step.slot_mapping, decode, prefill)

    def _decode_metadata(self, step: AttentionMetadata, seqs: list[int], tables: Tensor) -> DecodeMetadata | None:
        if not seqs:
            return None
        # Programs start in this order. A long one that started late would leave the rest of the GPU idle.
        values = sorted([(step.context_lens[i], step.query_start_loc[i], i) for i in seqs], reverse=True)
        lens, rows, indices = self._upload(list(zip(*values, strict=True)))
        return DecodeMetadata(tables, lens, self._context.decode_workspace(len(seqs)), rows, indices)

    def _prefill_metadata(self, step: AttentionMetadata, seqs: list[int], tables: Tensor) -> PrefillMetadata | None:
        if not seqs:
            return None
        rows, group = self._context.prefill_rows, self._context.num_heads // self._context.pool.num_kv_heads
        tiles = query_tiles(step.query_start_loc, step.context_lens, seqs, queries_per_tile(rows, group))
        starts, lens = self._upload(step.query_start_loc), self._upload(step.context_lens)
        return PrefillMetadata(tables, starts, lens, self._upload(tiles), rows)

    def _upload(self, values: Sequence[int] | Sequence[tuple[int, ...]]) -> Tensor:
        """Copy values to the device as int32. Pinned memory makes the copy asynchronous."""
        device = self._context.blocks.device
        host = torch.tensor(values, dtype=torch.int32, pin_memory=device.type == "cuda")
        return host.to(device, non_blocking=True)
