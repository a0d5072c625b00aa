"""Attention over tiles: each sequence attends to a few of its blocks at a time, and the results are merged.

    context    tile 0   tile 1       tile 2
    A (18)     ####     #### ####    #### ##..       block size 4, tile size 16: a tile holds one block each of three
    B (11)     ####     #### ###.                    sequences, two blocks each of two, or four blocks of one
    C (3)      ###.                                  . masked: unused slots of a sequence's last block

All decoding sequences whose contexts reach a tile share it: the fewer sequences, the more blocks of each, but always at
least one. Each tile is copied out of the pool before use, so attention needs memory for only one or two tiles, however
long the contexts are, and no operation runs once per decoding sequence. The kernels in ../cpu and ../gpu need no
copies: they read the blocks in place.
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from ...engine.kv_cache import KVCache
from .online_softmax import Part, attend_part, merge_attn_states, merge_into_first_rows


@dataclass(frozen=True)
class AttentionMetadata:
    """The tokens of a step. Sequence i owns tokens query_start_loc[i] .. query_start_loc[i + 1] - 1."""

    query_start_loc: list[int]  # [num_seqs + 1]
    context_lens: list[int]  # [num_seqs], including the tokens of this step
    block_tables: Tensor  # int64 [num_seqs, max_blocks], each row padded with its last block
    slot_mapping: Tensor  # int64 [num_tokens], slot of each token
    new_blocks: Tensor  # int64 [num_new_blocks], blocks whose first slot this step writes


class Tile(NamedTuple):
    """A few blocks of each of the `num_seqs` longest decoding sequences: the ones whose contexts reach this tile."""

    num_seqs: int
    num_slots: int  # per sequence
    pieces: Tensor  # int64 [num_seqs, 2 * num_blocks], see KVCache.pieces()
    mask: Tensor  # [num_seqs, 1, 1, num_slots], 0 inside a context, -inf past its end


class PagedAttention:
    """The attention backend: plan() returns a step's attention function, for any mix of prompts, chunks and decodes."""

    def __init__(self, kv_cache: KVCache, tile_size: int) -> None:
        """Use tiles of `tile_size` slots that all sequences share, but with at least one block per sequence."""
        self._kv_cache = kv_cache
        self._tile_size = tile_size

    def plan(self, step: AttentionMetadata) -> "PagedAttend":
        """Clear the blocks that are new in `step`, and return the step's attention function."""
        self._kv_cache.clear(step.new_blocks)
        return PagedAttend(self._kv_cache, self._tile_size, step)


class PagedAttend:
    """Attention for one step: a callable that all layers share.

    The slots to write, the decoding sequences and the tiles are computed once for all layers.
    """

    def __init__(self, kv_cache: KVCache, tile_size: int, step: AttentionMetadata) -> None:
        self._kv_cache = kv_cache
        self._tile_size = tile_size
        self._step = step
        self._rows = kv_cache.rows(step.slot_mapping)  # [2 * num_tokens]
        query_lens = [end - start for start, end in pairwise(step.query_start_loc)]
        self._chunks = [i for i, query_len in enumerate(query_lens) if query_len > 1]
        decodes = [i for i, query_len in enumerate(query_lens) if query_len == 1]
        decodes.sort(key=lambda i: -step.context_lens[i])  # longest first: a tile then covers the first num_seqs
        self._decode_rows = self._tensor([step.query_start_loc[i] for i in decodes])  # [num_decodes]
        block_tables = step.block_tables.index_select(0, self._tensor(decodes))  # [num_decodes, max_blocks]
        self._tiles = self._decode_tiles(block_tables, [step.context_lens[i] for i in decodes])

    def _decode_tiles(self, block_tables: Tensor, context_lens: list[int]) -> list[Tile]:
        """Return the tiles that cover all decoding sequences.

        `block_tables` is int64 [num_decodes, max_blocks]; `context_lens` [num_decodes] is sorted, longest first.
        """
        block_size, dtype, lens = self._kv_cache.block_size, self._kv_cache.dtype, self._tensor(context_lens)
        tiles, start = [], 0
        while num_seqs := sum(context_len > start for context_len in context_lens):
            num_blocks = min(self._blocks_per_seq(num_seqs), -(-(context_lens[0] - start) // block_size))
            num_slots = num_blocks * block_size
            assert num_slots > 0, "a tile reads at least one block"
            blocks = block_tables[:num_seqs, start // block_size :][:, :num_blocks]
            positions = torch.arange(start, start + num_slots, device=lens.device)
            is_past = positions >= lens[:num_seqs, None, None, None]  # [num_seqs, 1, 1, num_slots]
            mask = torch.zeros(is_past.shape, dtype=dtype, device=lens.device).masked_fill_(is_past, float("-inf"))
            tiles.append(Tile(num_seqs, num_slots, self._kv_cache.pieces(blocks), mask))
            start += num_slots
        return tiles

    def _blocks_per_seq(self, num_seqs: int) -> int:
        """Return the number of blocks per sequence in a tile that `num_seqs` sequences share."""
        return max(1, self._tile_size // (num_seqs * self._kv_cache.block_size))

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Store the keys and values of this step, then attend.

        q, out [num_tokens, num_heads, head_dim]; k, v [num_tokens, num_kv_heads, head_dim]
        """
        step = self._step
        num_queries = step.query_start_loc[-1]
        assert len(q) == num_queries, f"the step has {num_queries} queries, got {len(q)}"
        k, v = self._kv_cache.write(layer, self._rows, k, v)
        out = q.new_empty(q.shape)
        if self._tiles:
            decoded = self._decode(layer, q.index_select(0, self._decode_rows), num_kv_heads=k.shape[1])
            out.index_copy_(0, self._decode_rows, decoded)
        for i in self._chunks:
            rows = slice(step.query_start_loc[i], step.query_start_loc[i + 1])
            out[rows] = self._attend_chunk(layer, step.block_tables[i], step.context_lens[i], q[rows], k[rows], v[rows])
        return out

    def _decode(self, layer: int, q: Tensor, num_kv_heads: int) -> Tensor:
        """Attend with one query per sequence, longest context first.

        q, out [num_decodes, num_heads, head_dim]
        """
        # One query sees every key, so the query heads of a KV head can form the query axis: no key is repeated.
        grouped = torch.unflatten(q, 1, (num_kv_heads, -1))  # [num_decodes, num_kv_heads, group, head_dim]
        whole: Part | None = None
        for tile in self._tiles:
            k, v = self._kv_cache.read(layer, tile.pieces, tile.num_slots)  # [num_seqs, num_slots, num_kv_heads, ...]
            part = attend_part(grouped[: tile.num_seqs], k.transpose(1, 2), v.transpose(1, 2), tile.mask)
            whole = part if whole is None else merge_into_first_rows(whole, part)
        assert whole is not None, "no sequence decodes"
        return whole.out.flatten(1, 2).to(q.dtype)

    def _attend_chunk(
        self, layer: int, block_table: Tensor, context_len: int, q: Tensor, k: Tensor, v: Tensor
    ) -> Tensor:
        """Compute attention for a chunk of one sequence: first within the chunk, then tile by tile over earlier tokens.

        `k` and `v` hold the keys and values of the chunk, so only earlier ones are read from the pool. Query heads that
        share a KV head read it through views, so no key is repeated.
        q, out [query_len, num_heads, head_dim]; k, v [query_len, num_kv_heads, head_dim];
        block_table [max_blocks], which may extend past the context
        """
        group = q.shape[1] // k.shape[1]
        grouped = torch.unflatten(q, 1, (-1, group)).permute(2, 1, 0, 3)  # [group, num_kv_heads, query_len, head_dim]

        def expand_to_group(x: Tensor) -> Tensor:  # x [num_keys, num_kv_heads, head_dim]
            return x.transpose(0, 1).expand(group, -1, -1, -1)  # a view: [group, num_kv_heads, num_keys, head_dim]

        whole = attend_part(grouped, expand_to_group(k), expand_to_group(v), is_causal=True)
        num_computed, block_size, num_blocks = context_len - len(q), self._kv_cache.block_size, self._blocks_per_seq(1)
        for start in range(0, num_computed, num_blocks * block_size):
            blocks = block_table[start // block_size : -(-num_computed // block_size)][:num_blocks]
            keys, values = self._kv_cache.read(layer, self._kv_cache.pieces(blocks), num_computed - start)
            whole = merge_attn_states(whole, attend_part(grouped, expand_to_group(keys), expand_to_group(values)))
        return whole.out.permute(2, 1, 0, 3).flatten(1, 2).to(q.dtype)

    def _tensor(self, values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self._kv_cache.blocks.device)
