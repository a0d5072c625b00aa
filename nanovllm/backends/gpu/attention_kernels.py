r"""Paged attention in Triton: decode (one query per sequence), then prefill (many). Both read the pool in place.

In decode, a row is one sequence of the batch. As in Flash-Decoding, the context of a row is split among several
programs, and a second kernel merges their results. A kernel is a function that many programs run in parallel;
tl.program_id() tells them apart. A decode program handles one row, one KV head and one split of the row's context. For
row 0 with a context of 300 tokens, 2 KV heads and 3 splits:

    context            0 ......... 127  128 ........ 255  256 .. 299
    KV head 0          program 0,0,0    program 0,0,1     program 0,0,2   each program handles all query heads of its
    KV head 1          program 0,1,0    program 0,1,1     program 0,1,2   KV head, and reads its split tile by tile
                             \               |                /
    merge                one program per query head combines the three partial results

Why split? An H100 has 132 multiprocessors, and one row with 8 KV heads makes only 8 programs. The other
multiprocessors would idle while those 8 read the whole context, and 8 programs can't request memory as fast as the GPU
can deliver it.

A program reads its queries, the context length, and the block table entries, keys and values of each tile. A key is
read once for all query heads that share its KV head (GQA), and nothing past the end of the context is read.

Some Triton you need to read these kernels:

    tl.arange(0, 64)             a tensor of 64 numbers, spread over the program's threads; sizes are powers of two
    tl.load(x + i, mask, other)  reads memory at the pointer x plus the offsets i; returns `other` where mask is False
    N: tl.constexpr              a constant at compile time, such as a size; each new value recompiles the kernel
    kernel[grid](...)            launches the kernel; grid is the number of programs, in up to three dimensions

Any block size works, because each position is looked up separately. Lookups and masks cost little compared with loading
the keys: memory bandwidth limits kernels like these. So keys and values in 8 bits save time, too, although each becomes
a number of the model's type again before it is multiplied.

The functions that launch kernels take the same arguments as their plain versions. plain.py documents the shapes.
"""

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime import JITFunction, OutOfResources

from .early_start import EARLY_START_OPTIONS, start_next_and_wait
from .plain import DecodeMetadata, PoolSizes, PrefillMetadata
from .tiles import MAX_SPLITS, Pace, paces, queries_per_tile

SPLITS_PER_TILE = 16  # splits that merge_splits() reads at a time
LOG2_E = math.log2(math.e)  # exp(x) is 2 ** (x * LOG2_E), and GPUs have an instruction for powers of two


# The online softmax
#
# The softmax of a row needs the largest score, and the sum of exp(score). A program that reads tile by tile keeps
#
#     peak   [rows]          the largest score so far
#     total  [rows]          the sum of exp(score - peak) so far
#     out    [rows, width]   the sum of exp(score - peak) * value so far
#
# When a tile brings a larger peak, the program scales total and out down by exp(old peak - new peak). The attention
# over all keys so far is out / total. backends/torch/online_softmax.py does the same with whole tensors.


@triton.jit
def load_tile(
    keys,  # a layer's, and the next three arguments: see layer_of()
    values,
    scales,
    block_stride,
    slot_stride,
    table,  # int32 [max_blocks], a pointer
    position,  # [TILE]
    is_key,  # bool [TILE]; other positions aren't looked up, and get zeros
    kv_head,
    dim,  # [WIDTH]
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """Return a head's keys and values at these positions, as DTYPE [TILE, WIDTH] each."""
    block = tl.load(table + position // BLOCK_SIZE, mask=is_key, other=0).to(tl.int64)  # offsets may exceed 2**31
    slot = position % BLOCK_SIZE
    is_loaded = is_key[:, None] & (dim < HEAD_DIM)[None, :]
    if HAS_SCALES:  # int8_blocks.py has the layout
        head = block * block_stride + kv_head * BLOCK_SIZE * (2 * HEAD_DIM + 8)  # in bytes, like all strides
        quad, token, scale = head + slot // 4 * (4 * HEAD_DIM), slot % 4, head // 4 + BLOCK_SIZE * HEAD_DIM // 2 + slot
        k = tl.load(keys + (quad + token * 4)[:, None] + (dim // 4 * 16 + dim % 4)[None, :], mask=is_loaded, other=0)
        value = (quad + BLOCK_SIZE * HEAD_DIM + token)[:, None] + 4 * dim[None, :]
        v = tl.load(values + value, mask=is_loaded, other=0)
        k_scale = tl.load(scales + scale, mask=is_key, other=0.0)
        v_scale = tl.load(scales + scale + BLOCK_SIZE, mask=is_key, other=0.0)
        return (k.to(tl.float32) * k_scale[:, None]).to(DTYPE), (v.to(tl.float32) * v_scale[:, None]).to(DTYPE)
    else:
        offsets = (block * block_stride + slot * slot_stride)[:, None] + kv_head * HEAD_DIM + dim[None, :]
        k = tl.load(keys + offsets, mask=is_loaded, other=0.0)
        v = tl.load(values + offsets, mask=is_loaded, other=0.0)  # zeros, not stale memory: 0 * NaN is NaN
        return k.to(DTYPE), v.to(DTYPE)


@triton.jit
def add_tile(queries, k, v, is_seen, scale, peak, total, out):
    """Add a tile of keys to a running softmax, and return the new peak, total and out.

    After this tile, each row must have seen at least one key. `scale` includes LOG2_E, since exp2() replaces exp().

    queries [rows, width]; k, v [TILE, width]; is_seen bool, [rows, TILE] or [1, TILE]
    """
    # Tensor cores sum 16-bit products in float32. Without "ieee", they would drop bits of float32 inputs.
    scores = tl.dot(queries, tl.trans(k), input_precision="ieee")  # [rows, TILE]
    scores = tl.where(is_seen, scores, float("-inf"))
    new_peak = tl.maximum(peak, tl.max(scores, 1) * scale)
    weights = tl.exp2(scores * scale - new_peak[:, None])  # [rows, TILE], 0 for masked keys; a multiply-add for each
    correction = tl.exp2(peak - new_peak)  # [rows], 0 in the first tile
    out = out * correction[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
    return new_peak, total * correction + tl.sum(weights, 1), out


# Launches


def layer_of(blocks: Tensor, layer: int) -> tuple[Tensor, Tensor, Tensor | None, int, int]:
    """Return a layer of a pool: its keys, values and scales, and two strides, from a block and from a slot to the next.

    Keys and values are [num_blocks, block_size, num_kv_heads, head_dim] each. With int8, both are the bytes of the
    layer, and scales are the same bytes as float32, [num_blocks, num_kv_heads, ...] each.
    """
    if blocks.dtype == torch.uint8:
        integers = blocks[:, layer].view(torch.int8)
        return integers, integers, blocks[:, layer].view(torch.float32), integers.stride(0), 0
    keys, values = blocks[:, layer, 0], blocks[:, layer, 1]
    return keys, values, None, keys.stride(0), keys.stride(1)


FITTING: dict[tuple[Any, ...], int] = {}  # the first candidate that fits, by kernel, GPU, dtypes and constants


def launch(
    kernel: JITFunction[Any], grid: tuple[int, ...], candidates: list[Pace], *arguments: Any, **constants: Any
) -> None:
    """Launch an attention kernel at the first pace for which the GPU has the shared memory, or raise OutOfResources."""
    q = arguments[0]
    key = kernel, q.device, *(each.dtype for each in arguments[:2]), *constants.values()  # of queries and keys
    first = FITTING.get(key, 0)
    for number, (tile, num_stages) in enumerate(candidates[first:], first):
        try:
            kernel[grid](*arguments, TILE=tile, num_stages=num_stages, **constants, **EARLY_START_OPTIONS)
        except OutOfResources:
            if number == len(candidates) - 1:
                raise
        else:
            FITTING[key] = number
            return


# Decode


def paged_decode(q: Tensor, blocks: Tensor, layer: int, decodes: DecodeMetadata, out: Tensor) -> None:
    """Launch the kernels for plain.paged_decode(): two of them, or one if there is a single split."""
    block_tables, context_lens, workspace, rows, table_indices = decodes
    num_decodes, (num_heads, head_dim) = len(context_lens), q.shape[1:]
    (block_size, num_kv_heads), num_splits = PoolSizes.of(blocks, head_dim), workspace.num_splits
    assert q.is_contiguous() and out.is_contiguous() and block_tables.stride(1) == 1, "rows must be contiguous"
    assert len(rows) == len(table_indices) == num_decodes <= len(workspace.lses), (rows.shape, num_decodes)
    pool = layer_of(blocks, layer)
    width, group = triton.next_power_of_2(max(16, head_dim)), num_heads // num_kv_heads
    parts = out if num_splits == 1 else workspace.parts  # the result of a single split is final
    launch(
        attend_split, (num_kv_heads, num_splits, num_decodes), paces(width, blocks.element_size()),
        q, *pool, block_tables, context_lens, rows, table_indices, parts, workspace.lses, LOG2_E * head_dim**-0.5,
        block_tables.stride(0),
        GROUP=group, HEADS=triton.next_power_of_2(max(16, group)), HEAD_DIM=head_dim, WIDTH=width,
        BLOCK_SIZE=block_size, HAS_SCALES=pool[2] is not None, num_warps=4,
    )  # fmt: skip
    if num_splits > 1:
        merge_splits[(num_decodes, num_heads)](
            parts, workspace.lses, rows, out, num_splits, HEAD_DIM=head_dim, WIDTH=width, SPLITS=MAX_SPLITS,
            TILE=SPLITS_PER_TILE, num_warps=4, **EARLY_START_OPTIONS,
        )  # fmt: skip


# Triton compiles a separate variant for arguments divisible by 16. These arguments gain nothing from one.
@triton.jit(do_not_specialize=["block_tables", "context_lens", "rows", "table_indices", "table_stride"])
def attend_split(
    q,  # [rows, num_heads, head_dim]
    keys,  # of one layer, and the next four arguments: see layer_of()
    values,
    scales,
    block_stride,
    slot_stride,
    block_tables,  # int32 [num_tables, max_blocks]
    context_lens,  # int32 [num_decodes]
    rows,  # int32 [num_decodes], where the queries are in q
    table_indices,  # int32 [num_decodes]
    parts,  # [num_decodes, num_heads, num_splits, head_dim], or with one split [rows, num_heads, head_dim]; output
    lses,  # float32 [num_decodes, num_heads, num_splits], output
    scale,  # LOG2_E / sqrt(head_dim)
    table_stride,  # from one row of block_tables to the next
    GROUP: tl.constexpr,  # query heads per KV head
    HEADS: tl.constexpr,  # GROUP, padded for tensor cores
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,  # HEAD_DIM, padded
    BLOCK_SIZE: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    TILE: tl.constexpr,  # keys at a time
):
    """Compute the attention of one KV head's query heads over one split of one row's context."""
    start_next_and_wait()
    kv_head, split, decode = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    num_kv_heads, num_splits = tl.num_programs(0), tl.num_programs(1)
    context_len = tl.load(context_lens + decode)
    row, table = tl.load(rows + decode), block_tables + tl.load(table_indices + decode) * table_stride
    split_len = tl.cdiv(tl.cdiv(context_len, TILE), num_splits) * TILE
    first = split * split_len
    end = tl.minimum(first + split_len, context_len)  # at most `first` if the split is past the end: no iterations

    head, dim = tl.arange(0, HEADS), tl.arange(0, WIDTH)
    heads = (row * num_kv_heads + kv_head) * GROUP + head  # [HEADS], counted across all rows
    in_bounds = (head < GROUP)[:, None] & (dim < HEAD_DIM)[None, :]  # [HEADS, WIDTH]
    queries = tl.load(q + heads[:, None] * HEAD_DIM + dim[None, :], mask=in_bounds, other=0.0)

    peak = tl.full([HEADS], float("-inf"), tl.float32)
    total = tl.zeros([HEADS], tl.float32)
    out = tl.zeros([HEADS, WIDTH], tl.float32)
    for start in range(first, end, TILE):
        position = start + tl.arange(0, TILE)
        is_key = position < end  # [TILE]
        k, v = load_tile(
            keys, values, scales, block_stride, slot_stride, table, position, is_key,
            kv_head, dim, BLOCK_SIZE, HEAD_DIM, HAS_SCALES, queries.dtype,
        )  # fmt: skip
        peak, total, out = add_tile(queries, k, v, is_key[None, :], scale, peak, total, out)

    is_empty = total == 0.0
    out = out / tl.where(is_empty, 1.0, total)[:, None]
    lse = tl.where(is_empty, float("-inf"), peak + tl.log2(tl.where(is_empty, 1.0, total)))
    lse_at = ((decode * num_kv_heads + kv_head) * GROUP + head) * num_splits + split  # [HEADS]
    part = tl.where(num_splits == 1, heads, lse_at).to(tl.int64)  # [HEADS]; a single split is final
    tl.store(parts + part[:, None] * HEAD_DIM + dim[None, :], out.to(parts.dtype.element_ty), mask=in_bounds)
    tl.store(lses + lse_at, lse, mask=head < GROUP)


@triton.jit(do_not_specialize=["rows", "num_splits"])
def merge_splits(
    parts,  # float32 [num_decodes, num_heads, num_splits, head_dim]
    lses,  # float32 [num_decodes, num_heads, num_splits]
    rows,  # int32 [num_decodes]
    out,  # [rows, num_heads, head_dim]
    num_splits,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    SPLITS: tl.constexpr,  # MAX_SPLITS, since the kernel would be recompiled for each new number of splits
    TILE: tl.constexpr,  # splits at a time
):
    """Combine the partial results of one row and query head, each weighted by its split's share of the softmax."""
    start_next_and_wait()
    head = (tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)).to(tl.int64)
    i, dim = tl.arange(0, SPLITS), tl.arange(0, WIDTH)
    all_lses = tl.load(lses + head * num_splits + i, mask=i < num_splits, other=float("-inf"))  # [SPLITS]
    peak = tl.max(all_lses, 0)
    peak = tl.where(peak == float("-inf"), 0.0, peak)
    total = tl.sum(tl.exp2(all_lses - peak), 0)  # 0 for a padding row
    merged = tl.zeros([TILE, WIDTH], tl.float32)
    for start in tl.range(0, num_splits, TILE, num_stages=3):
        split = start + tl.arange(0, TILE)
        is_split = split < num_splits
        lse = tl.load(lses + head * num_splits + split, mask=is_split, other=float("-inf"))  # [TILE]
        offsets = (head * num_splits + split[:, None]) * HEAD_DIM + dim[None, :]  # [TILE, WIDTH]
        part = tl.load(parts + offsets, mask=is_split[:, None] & (dim < HEAD_DIM)[None, :], other=0.0)
        merged += part * tl.exp2(lse - peak)[:, None]
    result = tl.sum(merged, 0) / tl.where(total == 0.0, 1.0, total)  # [WIDTH]
    head = (tl.load(rows + tl.program_id(0)) * tl.num_programs(1) + tl.program_id(1)).to(tl.int64)
    tl.store(out + head * HEAD_DIM + dim, result.to(out.dtype.element_ty), mask=dim < HEAD_DIM)


# Prefill
#
# A program handles one KV head and one tile of neighboring queries. It reads the keys from position 0 up to its last
# query, in tiles too, as in decode. The keys of this step are already in the pool. With tiles of 3 queries and tiles of
# 4 keys, for a sequence with 4 tokens from an earlier step and 6 new tokens:
#
#                keys   0 1 2 3 | 4 5 6 7 | 8 9
#     program 0  q4     x x x x | x . . . |            x  seen
#                q5     x x x x | x x . . |            .  read but masked: the key comes after the query
#                q6     x x x x | x x x . |               keys after the tile's last query are not read
#     program 1  q7     x x x x | x x x x | . .
#                q8     x x x x | x x x x | x .
#                q9     x x x x | x x x x | x x
#
# In prefill, a row is one query of one query head: 3 queries with 4 query heads per KV head make 12 rows, which share
# every key that is loaded. There are no splits: a prompt has enough tiles of queries to fill a GPU. The host lists the
# tiles of queries (tiles.query_tiles), because sequences have different numbers of queries.


def paged_prefill(q: Tensor, blocks: Tensor, layer: int, prefills: PrefillMetadata, out: Tensor) -> None:
    """Launch the kernel for plain.paged_prefill(). The tiles come from query_tiles() and queries_per_tile()."""
    block_tables, query_start_loc, context_lens, tiles, rows_per_program = prefills
    num_heads, head_dim = q.shape[1:]
    block_size, num_kv_heads = PoolSizes.of(blocks, head_dim)
    assert q.is_contiguous() and out.is_contiguous() and tiles.is_contiguous() and block_tables.stride(1) == 1
    pool = layer_of(blocks, layer)
    width, group = triton.next_power_of_2(max(16, head_dim)), num_heads // num_kv_heads
    queries = queries_per_tile(rows_per_program, group)
    launch(
        attend_queries, (num_kv_heads, len(tiles)), paces(width, q.element_size()),
        q, *pool, block_tables, query_start_loc, context_lens, tiles, out, LOG2_E * head_dim**-0.5,
        block_tables.stride(0),
        GROUP=group, QUERIES=queries, ROWS=triton.next_power_of_2(max(16, queries * group)), HEAD_DIM=head_dim,
        WIDTH=width, BLOCK_SIZE=block_size, HAS_SCALES=pool[2] is not None,
        num_warps=choose_warps(rows_per_program, width, q.element_size()),
    )  # fmt: skip


def choose_warps(rows: int, width: int, itemsize: int) -> int:
    """Return the warps (32 threads each) for a program of `rows` rows: its data must fit into the threads' registers.

    >>> choose_warps(64, 128, 2), choose_warps(128, 128, 2), choose_warps(64, 256, 2), choose_warps(64, 64, 4)
    (4, 8, 8, 16)
    """
    if itemsize == 4:
        return 16
    return 4 if rows == 64 and width <= 128 else 8


@triton.jit(do_not_specialize=["block_tables", "query_start_loc", "context_lens", "tiles", "table_stride"])
def attend_queries(
    q,  # [num_tokens, num_heads, head_dim]
    keys,  # of one layer, and the next four arguments: see layer_of()
    values,
    scales,
    block_stride,
    slot_stride,
    block_tables,  # int32 [num_seqs, max_blocks]
    query_start_loc,  # int32 [num_seqs + 1]
    context_lens,  # int32 [num_seqs]
    tiles,  # int32 [num_tiles, 2]
    out,  # [num_tokens, num_heads, head_dim], output
    scale,  # LOG2_E / sqrt(head_dim)
    table_stride,  # from one row of block_tables to the next
    GROUP: tl.constexpr,  # query heads per KV head
    QUERIES: tl.constexpr,  # per tile
    ROWS: tl.constexpr,  # QUERIES * GROUP, padded
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,  # HEAD_DIM, padded
    BLOCK_SIZE: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    TILE: tl.constexpr,  # keys at a time
):
    """Compute the attention of one tile of queries, for one KV head's query heads, over the sequence's context."""
    start_next_and_wait()
    kv_head, tile = tl.program_id(0), tl.program_id(1)
    num_kv_heads = tl.num_programs(0)
    seq, first_token = tl.load(tiles + 2 * tile), tl.load(tiles + 2 * tile + 1)
    end_token = tl.minimum(tl.load(query_start_loc + seq + 1), first_token + QUERIES)
    # A token's position is its index in the step plus this shift, as the sequence's last token ends its context.
    shift = tl.load(context_lens + seq) - tl.load(query_start_loc + seq + 1)

    row, dim = tl.arange(0, ROWS), tl.arange(0, WIDTH)
    token = first_token + row // GROUP  # [ROWS]
    heads = (token.to(tl.int64) * num_kv_heads + kv_head) * GROUP + row % GROUP  # [ROWS], counted across all tokens
    in_bounds = (token < end_token)[:, None] & (dim < HEAD_DIM)[None, :]  # [ROWS, WIDTH]
    queries = tl.load(q + heads[:, None] * HEAD_DIM + dim[None, :], mask=in_bounds, other=0.0)

    peak = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    attended = tl.zeros([ROWS, WIDTH], tl.float32)
    end = end_token + shift  # one past the last query's position
    whole = (first_token + shift + 1) // TILE * TILE  # every query sees all keys before this position
    for IS_MASKED in tl.static_range(2):  # first the tiles that need no mask
        for start in range(whole if IS_MASKED else 0, end if IS_MASKED else whole, TILE):
            position = start + tl.arange(0, TILE)
            is_key = (position < end) | (IS_MASKED == 0)  # [TILE]
            k, v = load_tile(
                keys, values, scales, block_stride, slot_stride, block_tables + seq * table_stride, position, is_key,
                kv_head, dim, BLOCK_SIZE, HEAD_DIM, HAS_SCALES, queries.dtype,
            )  # fmt: skip
            is_seen = (position[None, :] <= (token + shift)[:, None]) | (IS_MASKED == 0)  # [ROWS, TILE]
            peak, total, attended = add_tile(queries, k, v, is_seen, scale, peak, total, attended)

    attended = attended / total[:, None]
    tl.store(out + heads[:, None] * HEAD_DIM + dim[None, :], attended.to(out.dtype.element_ty), mask=in_bounds)
