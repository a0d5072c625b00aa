"""Attention of one query for each sequence, on keys and values where they lie in the pool: split-KV (Flash-Decoding).

A kernel is a function that many programs run at the same time, each with its own numbers from tl.program_id(). Here
one program has one row, one KV head and one split of the row's context. For a row of 300 tokens, 2 KV heads, 3 splits:

    context            0 ......... 127  128 ........ 255  256 .. 299
    KV head 0          program 0,0,0    program 0,0,1     program 0,0,2   each has all query heads of its KV head, and
    KV head 1          program 0,1,0    program 0,1,1     program 0,1,2   goes through its split a tile at a time
                             \\               |                /
    merge                 one program for each query head adds up the three parts

Why splits: a GPU has 132 multiprocessors or so, and one row with 8 KV heads is 8 programs. The others would wait while
these 8 read the whole context, and no 8 programs can ask for as much memory at a time as the GPU can deliver.

What a program reads: its queries, the context's length, and for each tile the part of the block table, the keys and
the values. Each key is read once for all query heads that share it (GQA), and nothing is read behind the context.

How to read a kernel, in a few words:

    tl.arange(0, 64)             a tensor of 64 numbers, spread over the program's threads; sizes are powers of two
    tl.load(x + i, mask, other)  numbers from memory: x is a pointer, i a tensor of distances, `other` where mask is no
    N: tl.constexpr              known when the kernel is compiled: sizes. Each new value compiles the kernel anew
    kernel[grid](...)            starts the programs: grid is how many there are, in up to three directions

A block table of any block size works, because each position is looked up by itself. Lookups and masks cost little
beside the keys: a kernel of this kind waits for memory.
"""

import math

import triton
import triton.language as tl
from torch import Tensor

from .split import MAX_SPLITS, DecodeRoom, tile_size
from .tile import add_tile, find_slots

# While a tile is computed, loads of later tiles are under way. Keys wait for the block table's load, so a tile takes
# two stages of Triton's pipeline before its own: five stages have two tiles on their way, three would have one.
NUM_STAGES = 5
TILE_OF_SPLITS = 16  # that are merged at a time
LOG2_E = math.log2(math.e)  # exp(x) is 2 ** (x * LOG2_E), and a GPU has an instruction for powers of two


def paged_decode(
    q: Tensor, blocks: Tensor, layer: int, block_tables: Tensor, context_lens: Tensor, room: DecodeRoom, out: Tensor
) -> None:
    """Attention of one query for each row, into `out`. A row with context length 0 gives zeros.

    q, out [rows, num_heads, head_dim]; blocks [num_blocks, num_layers, 2, block_size, num_kv_heads, head_dim];
    block_tables int32 [rows, max_blocks]; context_lens int32 [rows]
    """
    rows, num_heads, head_dim = q.shape
    num_kv_heads, num_splits = blocks.shape[4], room.num_splits
    assert q.is_contiguous() and out.is_contiguous() and block_tables.stride(1) == 1, "a row's numbers lie end to end"
    assert len(block_tables) == len(context_lens) == rows <= len(room.lses), (block_tables.shape, rows, len(room.lses))
    keys, values = blocks[:, layer, 0], blocks[:, layer, 1]  # views: [num_blocks, block_size, num_kv_heads, head_dim]
    width, group = triton.next_power_of_2(max(16, head_dim)), num_heads // num_kv_heads
    parts = out if num_splits == 1 else room.parts  # one split is all of it
    attend_split[(rows, num_kv_heads, num_splits)](
        q, keys, values, block_tables, context_lens, parts, room.lses, LOG2_E * head_dim**-0.5,
        block_tables.stride(0), keys.stride(0), keys.stride(1),
        GROUP=group, HEADS=triton.next_power_of_2(max(16, group)), HEAD_DIM=head_dim, WIDTH=width,
        BLOCK_SIZE=blocks.shape[3], TILE=tile_size(width, blocks.element_size()),
        num_warps=4, num_stages=NUM_STAGES,
    )  # fmt: skip
    if num_splits > 1:
        merge_splits[(rows, num_heads)](
            parts, room.lses, out, num_splits, HEAD_DIM=head_dim, WIDTH=width, SPLITS=MAX_SPLITS, TILE=TILE_OF_SPLITS,
            num_warps=4,
        )  # fmt: skip


# Triton compiles a kernel anew for numbers and addresses that 16 divides, unless told where nothing is won by it.
@triton.jit(do_not_specialize=["block_tables", "context_lens", "table_stride"])
def attend_split(
    q,  # [rows, num_heads, head_dim]
    keys,  # of a layer, [num_blocks, block_size, num_kv_heads, head_dim]
    values,  # as keys
    block_tables,  # int32 [rows, max_blocks]
    context_lens,  # int32 [rows]
    parts,  # [rows, num_heads, num_splits, head_dim], what this kernel makes
    lses,  # float32 [rows, num_heads, num_splits], the other thing
    scale,  # of scores, so that they are powers of two
    table_stride,  # from a row of block_tables to the next
    block_stride,  # from a block to the next, in keys and in values
    slot_stride,  # from a token of a block to the next
    GROUP: tl.constexpr,  # query heads of a KV head
    HEADS: tl.constexpr,  # GROUP, padded for tensor cores
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,  # HEAD_DIM, padded
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,  # keys at a time
):
    """Attention of a group of query heads to one split of one row's context."""
    row, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    num_kv_heads, num_splits = tl.num_programs(1), tl.num_programs(2)
    context_len = tl.load(context_lens + row)
    split_len = tl.cdiv(tl.cdiv(context_len, TILE), num_splits) * TILE
    first = split * split_len
    last = tl.minimum(first + split_len, context_len)  # before `first` where the context ends earlier: no tile then

    head, dim = tl.arange(0, HEADS), tl.arange(0, WIDTH)
    heads = (row * num_kv_heads + kv_head) * GROUP + head  # [HEADS], counted through all rows
    is_number = (head < GROUP)[:, None] & (dim < HEAD_DIM)[None, :]  # [HEADS, WIDTH]
    queries = tl.load(q + heads[:, None] * HEAD_DIM + dim[None, :], mask=is_number, other=0.0)

    peak = tl.full([HEADS], float("-inf"), tl.float32)
    total = tl.zeros([HEADS], tl.float32)
    out = tl.zeros([HEADS, WIDTH], tl.float32)
    for start in range(first, last, TILE):
        position = start + tl.arange(0, TILE)
        is_key = position < last  # [TILE]
        slot = find_slots(block_tables + row * table_stride, position, is_key, block_stride, slot_stride, BLOCK_SIZE)
        place = slot[:, None] + kv_head * HEAD_DIM + dim[None, :]  # [TILE, WIDTH]
        is_there = is_key[:, None] & (dim < HEAD_DIM)[None, :]
        k = tl.load(keys + place, mask=is_there, other=0.0)
        v = tl.load(values + place, mask=is_there, other=0.0)  # zeros, not what was left there: 0 x NaN is NaN
        peak, total, out = add_tile(queries, k, v, is_key[None, :], scale, peak, total, out)

    is_empty = total == 0.0
    out = out / tl.where(is_empty, 1.0, total)[:, None]
    lse = tl.where(is_empty, float("-inf"), peak + tl.log2(tl.where(is_empty, 1.0, total)))
    part = (heads * num_splits + split).to(tl.int64)  # [HEADS]
    tl.store(parts + part[:, None] * HEAD_DIM + dim[None, :], out.to(parts.dtype.element_ty), mask=is_number)
    tl.store(lses + part, lse, mask=head < GROUP)


@triton.jit(do_not_specialize=["num_splits"])
def merge_splits(
    parts,  # float32 [rows, num_heads, num_splits, head_dim]
    lses,  # float32 [rows, num_heads, num_splits]
    out,  # [rows, num_heads, head_dim]
    num_splits,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    SPLITS: tl.constexpr,  # the most: the number of a step is no constant, or each would be compiled for itself
    TILE: tl.constexpr,  # splits at a time
):
    """One program for each row and query head: the parts, each with the share that its split has of the softmax."""
    head = (tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)).to(tl.int64)
    each, dim = tl.arange(0, SPLITS), tl.arange(0, WIDTH)
    all_lses = tl.load(lses + head * num_splits + each, mask=each < num_splits, other=float("-inf"))  # [SPLITS]
    peak = tl.max(all_lses, 0)
    peak = tl.where(peak == float("-inf"), 0.0, peak)
    total = tl.sum(tl.exp2(all_lses - peak), 0)  # 0 for a padding row
    merged = tl.zeros([TILE, WIDTH], tl.float32)
    for start in tl.range(0, num_splits, TILE, num_stages=3):
        split = start + tl.arange(0, TILE)
        is_split = split < num_splits
        lse = tl.load(lses + head * num_splits + split, mask=is_split, other=float("-inf"))  # [TILE]
        place = (head * num_splits + split[:, None]) * HEAD_DIM + dim[None, :]  # [TILE, WIDTH]
        part = tl.load(parts + place, mask=is_split[:, None] & (dim < HEAD_DIM)[None, :], other=0.0)
        merged += part * tl.exp2(lse - peak)[:, None]
    result = tl.sum(merged, 0) / tl.where(total == 0.0, 1.0, total)  # [WIDTH]
    tl.store(out + head * HEAD_DIM + dim, result.to(out.dtype.element_ty), mask=dim < HEAD_DIM)
