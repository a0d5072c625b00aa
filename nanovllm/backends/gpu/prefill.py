"""Attention of prompts, or chunks of them, on all that is in the pool: this step's own keys are written before.

One program has one KV head and one tile of queries, which are neighbours in a sequence. It goes through the keys from
the first position to its last query's own, a tile of keys at a time, like a program of decode.py. For a sequence whose
first 4 tokens were computed in an earlier step, and 6 more now, with 3 queries and 4 keys a tile:

               keys   0 1 2 3 | 4 5 6 7 | 8 9
    program 0  q4     x x x x | x . . . |            x  seen
               q5     x x x x | x x . . |            .  read, and hidden: it comes after the query
               q6     x x x x | x x x . |               nothing is read behind the last query's own key
    program 1  q7     x x x x | x x x x | . .
               q8     x x x x | x x x x | x .
               q9     x x x x | x x x x | x x

A row of a program is one query with one query head: 3 queries and 4 query heads for each KV head are 12 rows, which
share each key that is read. Splits are not needed: a prompt has enough tiles of queries to fill a GPU.

The host makes the list of tiles (split.py), because sequences have different numbers of queries.
"""

import triton
import triton.language as tl
from torch import Tensor

from .decode import LOG2_E
from .split import queries_of_tile, tile_size
from .tile import add_tile, find_slots


def paged_prefill(
    q: Tensor,
    blocks: Tensor,
    layer: int,
    block_tables: Tensor,
    query_start_loc: Tensor,
    context_lens: Tensor,
    tiles: Tensor,
    out: Tensor,
) -> None:
    """Attention of the last tokens of each sequence that has tiles, to all up to themselves. Other rows of `out` stay.

    q, out [num_tokens, num_heads, head_dim]; blocks [num_blocks, num_layers, 2, block_size, num_kv_heads, head_dim];
    block_tables int32 [num_seqs, max_blocks]; query_start_loc int32 [num_seqs + 1]; context_lens int32 [num_seqs];
    tiles int32 [num_tiles, 2], a sequence and a row of q each: what query_tiles() makes
    """
    num_heads, head_dim, num_kv_heads = q.shape[1], q.shape[2], blocks.shape[4]
    assert q.is_contiguous() and out.is_contiguous() and tiles.is_contiguous() and block_tables.stride(1) == 1
    keys, values = blocks[:, layer, 0], blocks[:, layer, 1]  # views: [num_blocks, block_size, num_kv_heads, head_dim]
    width, group = triton.next_power_of_2(max(16, head_dim)), num_heads // num_kv_heads
    queries = queries_of_tile(group)
    attend_queries[(len(tiles), num_kv_heads)](
        q, keys, values, block_tables, query_start_loc, context_lens, tiles, out, LOG2_E * head_dim**-0.5,
        block_tables.stride(0), keys.stride(0), keys.stride(1),
        GROUP=group, QUERIES=queries, ROWS=triton.next_power_of_2(max(16, queries * group)), HEAD_DIM=head_dim,
        WIDTH=width, BLOCK_SIZE=blocks.shape[3], TILE=tile_size(width, q.element_size()),
        num_warps=choose_warps(width, q.element_size()), num_stages=3,
    )  # fmt: skip


def choose_warps(width: int, itemsize: int) -> int:
    """Return how many times 32 threads share the rows: enough for a thread's part to fit into its registers.

    >>> choose_warps(128, 2), choose_warps(256, 2), choose_warps(64, 4)
    (4, 8, 16)
    """
    if itemsize == 4:
        return 16
    return 4 if width <= 128 else 8


@triton.jit(do_not_specialize=["block_tables", "query_start_loc", "context_lens", "tiles", "table_stride"])
def attend_queries(
    q,  # [num_tokens, num_heads, head_dim]
    keys,  # of a layer, [num_blocks, block_size, num_kv_heads, head_dim]
    values,  # as keys
    block_tables,  # int32 [num_seqs, max_blocks]
    query_start_loc,  # int32 [num_seqs + 1]
    context_lens,  # int32 [num_seqs]
    tiles,  # int32 [num_tiles, 2]
    out,  # [num_tokens, num_heads, head_dim], what this kernel makes
    scale,  # of scores, so that they are powers of two
    table_stride,  # from a row of block_tables to the next
    block_stride,  # from a block to the next, in keys and in values
    slot_stride,  # from a token of a block to the next
    GROUP: tl.constexpr,  # query heads of a KV head
    QUERIES: tl.constexpr,  # of a tile
    ROWS: tl.constexpr,  # QUERIES * GROUP, padded
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,  # HEAD_DIM, padded
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,  # keys at a time
):
    """Attention of a tile of queries, each with a group of query heads, to its sequence's context."""
    tile, kv_head = tl.program_id(0), tl.program_id(1)
    num_kv_heads = tl.num_programs(1)
    seq, first_token = tl.load(tiles + 2 * tile), tl.load(tiles + 2 * tile + 1)
    end_token = tl.minimum(tl.load(query_start_loc + seq + 1), first_token + QUERIES)
    # A token's position is its number in the step plus this: the last token is at the context's end.
    shift = tl.load(context_lens + seq) - tl.load(query_start_loc + seq + 1)

    row, dim = tl.arange(0, ROWS), tl.arange(0, WIDTH)
    token = first_token + row // GROUP  # [ROWS]
    heads = (token.to(tl.int64) * num_kv_heads + kv_head) * GROUP + row % GROUP  # [ROWS], counted through all tokens
    is_number = (token < end_token)[:, None] & (dim < HEAD_DIM)[None, :]  # [ROWS, WIDTH]
    queries = tl.load(q + heads[:, None] * HEAD_DIM + dim[None, :], mask=is_number, other=0.0)

    peak = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    attended = tl.zeros([ROWS, WIDTH], tl.float32)
    last = end_token + shift  # one more than the last query's position
    for start in range(0, last, TILE):
        position = start + tl.arange(0, TILE)
        is_key = position < last  # [TILE]
        slot = find_slots(block_tables + seq * table_stride, position, is_key, block_stride, slot_stride, BLOCK_SIZE)
        place = slot[:, None] + kv_head * HEAD_DIM + dim[None, :]  # [TILE, WIDTH]
        is_there = is_key[:, None] & (dim < HEAD_DIM)[None, :]
        k = tl.load(keys + place, mask=is_there, other=0.0)
        v = tl.load(values + place, mask=is_there, other=0.0)  # zeros, not what was left there: 0 x NaN is NaN
        is_seen = is_key[None, :] & (position[None, :] <= (token + shift)[:, None])  # [ROWS, TILE], position 0 by all
        peak, total, attended = add_tile(queries, k, v, is_seen, scale, peak, total, attended)

    attended = attended / total[:, None]
    tl.store(out + heads[:, None] * HEAD_DIM + dim[None, :], attended.to(out.dtype.element_ty), mask=is_number)
