"""The `attend` of this stage: keys and values are read where their blocks lie, a tile of blocks at a time.

    context    tile 0   tile 1       tile 2
    A (18)     ####     #### ####    #### ##..       block size 4, tile size 16: a block of each of three,
    B (11)     ####     #### ###.                    or two of each of two, or four of one
    C (3)      ###.                                  . masked: the rest of a last block

In decode all sequences of like length go through a tile together; a tile is shared out among those that reach it. Each
gives attention to its own keys; merge() makes one of two. So a step needs room for a tile or two besides the pool,
however long the contexts and however many, and nothing is done once a sequence. (Here a tile is still copied before it
is read; a kernel would read it in place.)
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from .kv_cache import KVCache
from .online_softmax import Part, attend_part, merge, merge_first

MOST_PADDING = 128  # slots: a sequence shorter than the longest of a group by more than that begins the next group


@dataclass(frozen=True)
class AttentionMetadata:
    """What a step's tokens are: sequence i has rows query_start_loc[i] .. query_start_loc[i + 1] - 1."""

    query_start_loc: list[int]  # [num_seqs + 1]
    context_lens: list[int]  # [num_seqs], this step's tokens counted
    block_tables: Tensor  # int64 [num_seqs, max_blocks], a shorter table goes on with its own last block
    slot_mapping: Tensor  # int64 [num_tokens], the slot of each row
    new_blocks: Tensor  # int64 [num_new_blocks], those whose first slot is written


class Tile(NamedTuple):
    """Some blocks of each sequence that reaches so far, and which of their slots hold a token."""

    pieces: Tensor  # of KVCache, int64 [num_seqs, 2 * blocks in the tile]
    mask: Tensor  # [num_seqs, 1, 1, slots in the tile], 0 in a context, -inf behind its end


class PagedAttention:
    """Stores a step's keys and values, then attends: any mixture of prompts, chunks of prompts and newest tokens.

    One object for the life of an engine.
    """

    def __init__(self, kv_cache: KVCache, tile_size: int) -> None:
        """`tile_size` in slots, of all sequences together; a tile has whole blocks of each, at least one."""
        self._kv_cache = kv_cache
        self._tile_size = tile_size
        self._step: AttentionMetadata | None = None

    def begin(self, step: AttentionMetadata) -> None:
        """What is the same in all layers: where to write, who decodes, in which tiles. New blocks are cleared."""
        self._step = step
        self._kv_cache.clear(step.new_blocks)
        self._rows = self._kv_cache.rows(step.slot_mapping)  # [2 * num_tokens]
        query_lens = [end - start for start, end in pairwise(step.query_start_loc)]
        self._chunks = [i for i, query_len in enumerate(query_lens) if query_len > 1]
        decodes = [i for i, query_len in enumerate(query_lens) if query_len == 1]
        decodes.sort(key=lambda i: -step.context_lens[i])  # longest first: a tile is then for the first so many
        self._is_all = decodes == list(range(len(query_lens)))  # and in this order: then no rows need picking
        self._decode_rows = self._tensor([step.query_start_loc[i] for i in decodes])  # [num_decodes]
        tables = step.block_tables.index_select(0, self._tensor(decodes))  # [num_decodes, max_blocks]
        lens = [step.context_lens[i] for i in decodes]
        self._groups = [self._decode_tiles(tables[seqs], lens[seqs]) for seqs in like_lengths(lens, MOST_PADDING)]

    def _decode_tiles(self, block_tables: Tensor, context_lens: list[int]) -> list[Tile]:
        """Of one group. block_tables [num_seqs, max_blocks]; context_lens [num_seqs], longest first"""
        block_size, dtype = self._kv_cache.block_size, self._kv_cache.blocks.dtype
        ends, longest = self._tensor(context_lens), context_lens[0]
        tiles, start = [], 0
        while start < longest:
            num_seqs = sum(context_len > start for context_len in context_lens)
            num_blocks = min(self._blocks_of_each(num_seqs), -(-(longest - start) // block_size))
            blocks = block_tables[:num_seqs, start // block_size :][:, :num_blocks]
            positions = torch.arange(start, start + num_blocks * block_size, device=ends.device)
            behind = positions >= ends[:num_seqs, None, None, None]  # [num_seqs, 1, 1, slots]
            mask = torch.zeros(behind.shape, dtype=dtype, device=ends.device).masked_fill_(behind, float("-inf"))
            tiles.append(Tile(self._kv_cache.pieces(blocks), mask))
            start += num_blocks * block_size
        return tiles

    def _blocks_of_each(self, num_seqs: int) -> int:
        """In a tile that so many share."""
        return max(1, self._tile_size // (num_seqs * self._kv_cache.block_size))

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q, out [num_tokens, num_heads, head_dim]; k, v [num_tokens, num_kv_heads, head_dim]"""
        step = self._step
        assert step is not None and q.shape[0] == step.query_start_loc[-1], "begin() must name this step's tokens"
        self._kv_cache.write(layer, self._rows, k, v)
        if self._is_all:
            return self._decode(layer, q, num_kv_heads=k.shape[1])
        out = q.new_empty(q.shape)
        if self._groups:
            decoded = self._decode(layer, q.index_select(0, self._decode_rows), num_kv_heads=k.shape[1])
            out.index_copy_(0, self._decode_rows, decoded)
        for i in self._chunks:
            rows = slice(step.query_start_loc[i], step.query_start_loc[i + 1])
            out[rows] = self._attend_chunk(layer, step.block_tables[i], step.context_lens[i], q[rows], k[rows], v[rows])
        return out

    def _decode(self, layer: int, q: Tensor, num_kv_heads: int) -> Tensor:
        """One query of each sequence, longest context first, group by group. q, out [num_decodes, num_heads, head_dim]

        Heads that share a KV head may be the query axis of attend_part(): nothing is repeated for them.
        """
        queries = q.unflatten(1, (num_kv_heads, -1)).split([len(tiles[0].mask) for tiles in self._groups])
        outs = [self._decode_group(layer, *group) for group in zip(queries, self._groups, strict=True)]
        return torch.cat(outs).flatten(1, 2).to(q.dtype)

    def _decode_group(self, layer: int, q: Tensor, tiles: list[Tile]) -> Tensor:
        """A tile's mask has a row for each sequence that reaches it: the first so many.

        q, out [num_seqs, num_kv_heads, num_heads / num_kv_heads, head_dim], longest context first
        """
        whole: Part | None = None
        for pieces, mask in tiles:
            num_seqs, _, _, slots = mask.shape
            # [num_seqs, num_kv_heads, slots, head_dim]
            keys, values = (x.transpose(1, 2) for x in self._kv_cache.read(layer, pieces, slots))
            part = attend_part(q[:num_seqs], keys, values, mask)
            whole = part if whole is None else merge_first(whole, part)
        assert whole is not None
        return whole.out

    def _attend_chunk(
        self, layer: int, block_table: Tensor, context_len: int, q: Tensor, k: Tensor, v: Tensor
    ) -> Tensor:
        """Tokens of one sequence, on what was computed before, tile by tile, and on themselves.

        Their own keys and values are at hand; the pool is read only before them. block_table may be longer than the
        context. Heads that share a KV head read it through views: nothing is repeated for them here either.
        q, out [query_len, num_heads, head_dim]; k, v [query_len, num_kv_heads, head_dim]; block_table [max_blocks]
        """
        group = q.shape[1] // k.shape[1]
        grouped = q.unflatten(1, (-1, group)).permute(2, 1, 0, 3)  # [group, num_kv_heads, query_len, head_dim]

        def for_group(x: Tensor) -> Tensor:  # a view: [num_keys, num_kv_heads, head_dim] -> as above, num_keys long
            return x.transpose(0, 1).expand(group, -1, -1, -1)

        whole = attend_part(grouped, for_group(k), for_group(v), is_causal=True)
        num_computed, block_size, num_blocks = context_len - len(q), self._kv_cache.block_size, self._blocks_of_each(1)
        for start in range(0, num_computed, num_blocks * block_size):
            blocks = block_table[start // block_size :][:num_blocks]
            keys, values = self._kv_cache.read(layer, self._kv_cache.pieces(blocks), num_computed - start)
            whole = merge(whole, attend_part(grouped, for_group(keys), for_group(values)))
        return whole.out.permute(2, 1, 0, 3).flatten(1, 2).to(q.dtype)

    def _tensor(self, values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self._kv_cache.blocks.device)


def like_lengths(context_lens: list[int], most_padding: int) -> list[slice]:
    """Groups of neighbours, each at most so many slots shorter than the first of its group.

    So there are at most longest / most_padding groups, rounded up, however many sequences there are.
    context_lens [num_seqs], longest first
    >>> like_lengths([420, 400, 300, 290, 16], most_padding=128)
    [slice(0, 3, None), slice(3, 4, None), slice(4, 5, None)]
    """
    groups, first = [], 0
    for i, context_len in enumerate(context_lens):
        if context_lens[first] - context_len > most_padding:
            groups.append(slice(first, i))
            first = i
    return [*groups, slice(first, len(context_lens))] if context_lens else []


def slots_of(block_tables: Tensor, seqs: Tensor, positions: Tensor, block_size: int) -> Tensor:
    """The slot of each token: token i is of sequence seqs[i], at positions[i]. All int64 [num_tokens].

    >>> seqs, positions = torch.tensor([0, 0, 1]), torch.tensor([3, 4, 2])
    >>> slots_of(torch.tensor([[3, 0], [1, 1]]), seqs, positions, block_size=4).tolist()
    [15, 0, 6]
    """
    return block_tables[seqs, positions // block_size] * block_size + positions % block_size
