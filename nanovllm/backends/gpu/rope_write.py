"""From the projection's output to attention's input in one kernel: norm of heads, rotation, the write to the pool.

One program has one row and one KV head: its group of query heads, its key and its value. With 4 query heads
and 2 KV heads:

    qkv of a row    q0   q1   q2   q3   k0   k1   v0   v1
    program row,0   x    x              x         x            q0, q1 -> q_out    k0, v0 -> the row's slot
    program row,1             x    x         x         x       q2, q3 -> q_out    k1, v1 -> the row's slot

A head turns as pairs (x[i], x[i + head_dim / 2]), so a program holds a head as two halves.

What this saves: the model's own operations read and write every number of q and k about ten times, with a launch each.
Here it is once. What it keeps: each result is rounded where theirs is, so the numbers that arrive are theirs.
"""

import triton
import triton.language as tl
from torch import Tensor


def rotate_and_write(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    slot_mapping: Tensor,
    blocks: Tensor,
    layer: int,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    q_out: Tensor,
) -> None:
    """Norm of the heads (if there are weights), rotation; the queries go to q_out, keys and values into the pool.

    A row with slot -1 writes nothing to the pool, and its queries are zeros.
    qkv [rows, num_heads + 2 * num_kv_heads, head_dim]; cos, sin [max_model_len, head_dim]; positions int64 [rows];
    slot_mapping int64 [rows]; blocks [num_blocks, num_layers, 2, block_size, num_kv_heads, head_dim];
    q_norm, k_norm [head_dim]; q_out [rows, num_heads, head_dim]
    """
    rows, num_heads, head_dim = q_out.shape
    num_kv_heads = blocks.shape[4]
    group = num_heads // num_kv_heads
    assert qkv.shape == (rows, num_heads + 2 * num_kv_heads, head_dim), (qkv.shape, q_out.shape, num_kv_heads)
    assert qkv.is_contiguous() and q_out.is_contiguous() and cos.is_contiguous() and sin.is_contiguous()
    keys, values = blocks[:, layer, 0], blocks[:, layer, 1]  # views: [num_blocks, block_size, num_kv_heads, head_dim]
    rotate_and_write_row[(rows, num_kv_heads)](
        qkv, cos, sin, positions, slot_mapping, keys, values, q_norm, k_norm, q_out, eps,
        keys.stride(0), keys.stride(1),
        GROUP=group, HEADS=triton.next_power_of_2(group), HALF=head_dim // 2,
        HALF_WIDTH=triton.next_power_of_2(head_dim // 2), BLOCK_SIZE=blocks.shape[3], HAS_NORM=q_norm is not None,
        num_warps=2,
    )  # fmt: skip


@triton.jit
def normalize(first, second, weight, half, is_half, eps, SIZE: tl.constexpr, DTYPE: tl.constexpr):
    """RMSNorm of heads that are held as halves: the quotient is rounded, then multiplied, then rounded.

    first, second float32 [heads, HALF_WIDTH]; weight [SIZE], a pointer; half, is_half [HALF_WIDTH]
    """
    squares = tl.sum(first * first + second * second, 1) / SIZE  # [heads]
    factor = tl.rsqrt(squares + eps)[:, None]
    first_weight = tl.load(weight + half, mask=is_half, other=0.0).to(tl.float32)[None, :]
    second_weight = tl.load(weight + SIZE // 2 + half, mask=is_half, other=0.0).to(tl.float32)[None, :]
    first = (first * factor).to(DTYPE).to(tl.float32) * first_weight
    second = (second * factor).to(DTYPE).to(tl.float32) * second_weight
    return first.to(DTYPE).to(tl.float32), second.to(DTYPE).to(tl.float32)


@triton.jit
def rotate(first, second, cos, sin, DTYPE: tl.constexpr):
    """Both products are rounded before they are added. first, second [heads, HALF_WIDTH]; cos, sin [1, HALF_WIDTH]"""
    left = (first * cos).to(DTYPE).to(tl.float32) - (second * sin).to(DTYPE).to(tl.float32)
    right = (second * cos).to(DTYPE).to(tl.float32) + (first * sin).to(DTYPE).to(tl.float32)
    return left.to(DTYPE), right.to(DTYPE)


@triton.jit
def turned(
    heads,  # [heads, HALF_WIDTH], pointers to the first halves
    is_number,  # as heads
    weight,  # [SIZE], of the norm, or None
    half,  # [HALF_WIDTH]
    is_half,  # [HALF_WIDTH]
    cos,  # [1, HALF_WIDTH]
    sin,  # [1, HALF_WIDTH]
    eps,
    SIZE: tl.constexpr,
    HAS_NORM: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """Heads from memory, with their norm if there is one, rotated: two halves."""
    first = tl.load(heads, mask=is_number, other=0.0).to(tl.float32)
    second = tl.load(heads + SIZE // 2, mask=is_number, other=0.0).to(tl.float32)
    if HAS_NORM:
        first, second = normalize(first, second, weight, half, is_half, eps, SIZE, DTYPE)
    return rotate(first, second, cos, sin, DTYPE)


@triton.jit(do_not_specialize=["positions", "slot_mapping"])
def rotate_and_write_row(
    qkv,  # [rows, num_heads + 2 * num_kv_heads, head_dim]
    cos,  # [max_model_len, head_dim], the two halves of a row are equal
    sin,  # as cos
    positions,  # int64 [rows]
    slot_mapping,  # int64 [rows]
    keys,  # of a layer, [num_blocks, block_size, num_kv_heads, head_dim], what this kernel writes to
    values,  # as keys
    q_norm,  # [head_dim] or None
    k_norm,  # [head_dim] or None
    q_out,  # [rows, num_heads, head_dim], the other thing that this kernel writes to
    eps,
    block_stride,  # from a block to the next, in keys and in values
    slot_stride,  # from a token of a block to the next
    GROUP: tl.constexpr,  # query heads of a KV head
    HEADS: tl.constexpr,  # GROUP, padded
    HALF: tl.constexpr,  # of head_dim
    HALF_WIDTH: tl.constexpr,  # HALF, padded
    BLOCK_SIZE: tl.constexpr,
    HAS_NORM: tl.constexpr,
):
    """One row's queries of one KV head, its key and its value."""
    row, kv_head, num_kv_heads = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    DTYPE: tl.constexpr = q_out.dtype.element_ty
    SIZE: tl.constexpr = 2 * HALF
    slot = tl.load(slot_mapping + row)
    is_row = slot >= 0  # a padding row loads nothing: it may have any position
    head, half = tl.arange(0, HEADS), tl.arange(0, HALF_WIDTH)
    is_half = (half < HALF) & is_row  # [HALF_WIDTH]
    angles = tl.load(positions + row, mask=is_row, other=0) * SIZE + half
    c = tl.load(cos + angles, mask=is_half, other=0.0).to(DTYPE).to(tl.float32)[None, :]
    s = tl.load(sin + angles, mask=is_half, other=0.0).to(DTYPE).to(tl.float32)[None, :]

    qkv += row * (GROUP + 2) * num_kv_heads * SIZE  # this row's
    heads = (kv_head * GROUP + head)[:, None] * SIZE + half[None, :]  # [HEADS, HALF_WIDTH]
    is_query = (head < GROUP)[:, None] & is_half[None, :]
    first, second = turned(qkv + heads, is_query, q_norm, half, is_half, c, s, eps, SIZE, HAS_NORM, DTYPE)
    is_query = (head < GROUP)[:, None] & (half < HALF)[None, :]  # a padding row's too: zeros
    q_out += row * GROUP * num_kv_heads * SIZE
    tl.store(q_out + heads, first, mask=is_query)
    tl.store(q_out + heads + HALF, second, mask=is_query)

    key = (GROUP * num_kv_heads + kv_head) * SIZE + half[None, :]  # [1, HALF_WIDTH]
    is_key = is_half[None, :]
    place = slot // BLOCK_SIZE * block_stride + slot % BLOCK_SIZE * slot_stride + kv_head * SIZE + half[None, :]
    first, second = turned(qkv + key, is_key, k_norm, half, is_half, c, s, eps, SIZE, HAS_NORM, DTYPE)
    tl.store(keys + place, first, mask=is_key)
    tl.store(keys + place + HALF, second, mask=is_key)

    value = key + num_kv_heads * SIZE
    tl.store(values + place, tl.load(qkv + value, mask=is_key), mask=is_key)
    tl.store(values + place + HALF, tl.load(qkv + value + HALF, mask=is_key), mask=is_key)
