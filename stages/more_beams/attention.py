"""Attention over tiles of blocks: all sequences attend to a few of their blocks at a time, and the results are merged.

Each tile is copied out of the pool and read there. So the room beside the pool is bounded by a tile, however long the
contexts are, and no operation runs once per sequence. A kernel goes one step further: it reads the blocks in place.
"""

from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from .block_manager import cdiv
from .kv_cache import KVCache
from .llama import Attend
from .online_softmax import Part, attend_part, merge_attn_states

MAX_QUERIES = 64  # in a row of a batch: a longer chunk of a prompt takes several rows


@dataclass(frozen=True)
class AttentionMetadata:
    """The tokens of a step: sequence i has tokens query_start_loc[i] .. query_start_loc[i + 1] - 1."""

    query_start_loc: list[int]  # [num_seqs + 1]
    context_lens: list[int]  # [num_seqs], including the tokens of this step
    block_tables: Tensor  # int64 [num_seqs, max_blocks], a short row is filled up with blocks of its own
    slot_mapping: Tensor  # int64 [num_tokens], slot of each token
    new_blocks: Tensor  # int64 [num_new_blocks], blocks whose first slot is written in this step


class Queries(NamedTuple):
    """Consecutive tokens of one sequence."""

    seq: int
    start: int  # tokens start .. end - 1 of the step
    end: int
    context_len: int  # of the last one, itself included


class Tile(NamedTuple):
    """A few blocks of each row of a batch whose context reaches that far."""

    rows: Tensor  # int64 [num_rows], of the batch
    blocks: Tensor  # int64 [num_rows, num_blocks]
    keys: Tensor  # int64 [num_slots], positions in the text
    queries: Tensor  # int64 [num_rows, 1, 1, query_len, 1], positions in the text


class Batch(NamedTuple):
    """Rows of queries that go through tiles together."""

    tokens: Tensor  # int64 [num_rows, query_len], of the step; a shorter row is padded with its own last token
    tiles: list[Tile]


class PagedAttention:
    """The attention backend: plan() returns the `attend` of a step with any mixture of prompts, chunks and decodes."""

    def __init__(self, kv_cache: KVCache, tile_size: int) -> None:
        """Set the size of a tile, in slots of all its rows together. It has at least one block of each row."""
        self._kv_cache = kv_cache
        self._tile_size = tile_size

    def plan(self, step: AttentionMetadata) -> Attend:
        """Clear the blocks that are new in this step, and cut the step into batches and tiles, once for all layers."""
        self._kv_cache.clear(step.new_blocks)
        decodes: list[Queries] = []
        chunks: list[Queries] = []
        for seq, (first, last) in enumerate(pairwise(step.query_start_loc)):
            for start in range(first, last, MAX_QUERIES):
                end = min(start + MAX_QUERIES, last)
                row = Queries(seq, start, end, step.context_lens[seq] - (last - end))
                (decodes if end - start == 1 else chunks).append(row)
        size = max(1, self._tile_size // self._kv_cache.block_size)  # rows of a batch: a tile has a block of each
        groups = [rows[i : i + size] for rows in (decodes, chunks) for i in range(0, len(rows), size)]
        batches = [self._batch(step.block_tables, rows) for rows in groups]
        return partial(self._attend, step.slot_mapping, batches)

    def _batch(self, block_tables: Tensor, rows: list[Queries]) -> Batch:
        """Return rows with their tiles. block_tables is int64 [num_seqs, max_blocks]."""
        seqs, starts, ends, context_lens = self._tensor(rows).T.unsqueeze(-1)  # [num_rows, 1] each
        query_len, longest = max(row.end - row.start for row in rows), max(row.context_len for row in rows)
        tokens = torch.minimum(starts + torch.arange(query_len, device=starts.device), ends - 1)
        positions = tokens + context_lens - ends  # [num_rows, query_len], as tokens
        block_size, tiles, first = self._kv_cache.block_size, [], 0
        while first * block_size < longest:
            reaching = self._tensor([i for i, row in enumerate(rows) if row.context_len > first * block_size])
            last = first + max(1, self._tile_size // (len(reaching) * block_size))
            last = min(last, cdiv(longest, block_size))
            blocks = block_tables[seqs[reaching, 0], first:last]
            keys = torch.arange(first * block_size, last * block_size, device=blocks.device)
            tiles.append(Tile(reaching, blocks, keys, positions[reaching, None, None, :, None]))
            first = last
        return Batch(tokens, tiles)

    def _attend(
        self, slot_mapping: Tensor, batches: list[Batch], layer: int, q: Tensor, k: Tensor, v: Tensor
    ) -> Tensor:
        """Store the keys and values of this step, then attend batch by batch and tile by tile.

        A token sees the keys up to its own position. Each tensor is at most a tile of keys and values (or as large as
        q), and no operation runs once per sequence.

        q, out [num_tokens, num_heads, head_dim]; k, v [num_tokens, num_kv_heads, head_dim]
        """
        self._kv_cache.write(layer, slot_mapping, k, v)
        out = torch.empty_like(q)
        for tokens, tiles in batches:
            grouped = q[tokens].unflatten(2, (k.shape[1], -1))  # [num_rows, query_len, num_kv_heads, group, head_dim]
            grouped = grouped.permute(0, 2, 3, 1, 4)  # [num_rows, num_kv_heads, group, query_len, head_dim]
            whole: Part | None = None
            for tile in tiles:
                keys, values = self._kv_cache.read(layer, tile.blocks)  # [num_rows, num_slots, num_kv_heads, head_dim]
                is_hidden = tile.keys > tile.queries  # [num_rows, 1, 1, query_len, num_slots], True: may not be seen
                part = attend_part(grouped[tile.rows], keys.transpose(1, 2), values.transpose(1, 2), is_hidden)
                if whole is None:  # the first tile has all rows
                    whole = part
                else:
                    merged = merge_attn_states(Part(whole.out[tile.rows], whole.lse[tile.rows]), part)
                    whole.out[tile.rows], whole.lse[tile.rows] = merged.out, merged.lse
            out[tokens] = whole.out.permute(0, 3, 1, 2, 4).flatten(2, 3).to(q.dtype)
        return out

    def _tensor(self, values: list) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self._kv_cache.blocks.device)
