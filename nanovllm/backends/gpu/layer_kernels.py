"""Triton kernels for the rest of a step: embedding, norm, activation, rotation with the write to the pool, and gemv.

Each kernel rounds wherever the model's own operations round, so results are the same to the bit, unless numbers are
summed in another order. Read attention_kernels.py first: it explains Triton. plain.py documents the arguments
and their shapes.
"""

import triton
import triton.language as tl
from torch import Tensor

from ...engine.kv_cache import FP8, MAX_FP8
from .attention_kernels import layer_of
from .early_start import EARLY_START_OPTIONS, start_next_and_wait
from .plain import NormBefore, PoolSizes

NORM_SIZE_PER_WARP = 512  # numbers of a row
SILU_SIZE = 1024  # outputs per program
GEMV_TILE = 4096  # weights per tile
# In weights. An H100 reads rows longer than LONG_ROW faster with 8 warps and with tiles of LONG_WIDTH columns.
LONG_ROW, LONG_WIDTH = 4096, 2048


# The first kernel of a step. A placeholder stands for the token of a row of the latest step.
#
#     program r    token r, or the latest step's    its row of the weight -> row r of out


def embed(input_ids: Tensor, latest_tokens: Tensor, weight: Tensor, out: Tensor) -> None:
    """Launch the kernel for plain.embed()."""
    rows, size = out.shape
    assert weight.shape[1] == size and weight.is_contiguous() and out.is_contiguous(), (weight.shape, out.shape)
    width = triton.next_power_of_2(size)
    embed_row[(rows,)](input_ids, latest_tokens, weight, out, size, width, num_warps=4, **EARLY_START_OPTIONS)


@triton.jit(do_not_specialize=["input_ids", "latest_tokens"])
def embed_row(
    input_ids,  # int64 [rows]
    latest_tokens,  # int64 [max_rows]
    weight,  # [vocab_size, size]
    out,  # [rows, size], output
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,  # SIZE, padded
):
    """Copy the embedding of one row's token."""
    start_next_and_wait()
    row, i = tl.program_id(0).to(tl.int64), tl.arange(0, WIDTH)
    token = tl.load(input_ids + row)
    if token < 0:
        token = tl.load(latest_tokens + ~token)
    tl.store(out + row * SIZE + i, tl.load(weight + token * SIZE + i, mask=i < SIZE), mask=i < SIZE)


# RMSNorm, and the addition before it: a layer's result is added to the residual, and the next layer normalizes the sum.
#
#     program r    row r:   residual + x -> residual    residual / rms * weight -> out
#
# A program holds a whole row: it needs every number for the sum of squares, and reads every number once.


def add_rms_norm(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, out: Tensor) -> None:
    """Launch the kernel for plain.add_rms_norm(). `out` may be x."""
    rows, size = x.shape
    assert out.shape == x.shape and weight.shape == (size,), (x.shape, weight.shape, out.shape)
    assert x.is_contiguous() and out.is_contiguous() and (residual is None or residual.is_contiguous())
    width = triton.next_power_of_2(size)
    add_rms_norm_row[(rows,)](
        x, residual, weight, out, eps, SIZE=size, WIDTH=width, HAS_RESIDUAL=residual is not None,
        num_warps=max(1, min(16, width // NORM_SIZE_PER_WARP)), **EARLY_START_OPTIONS,
    )  # fmt: skip


@triton.jit
def add_rms_norm_row(
    x,  # [rows, size]
    residual,  # [rows, size], or None
    weight,  # [size]
    out,  # [rows, size]
    eps,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,  # SIZE, padded
    HAS_RESIDUAL: tl.constexpr,
):
    """Normalize one row. The sum, the quotient and the product are each rounded, as in the model."""
    start_next_and_wait()
    i = tl.arange(0, WIDTH)
    in_bounds = i < SIZE
    offsets = tl.program_id(0).to(tl.int64) * SIZE + i  # [WIDTH]
    numbers = tl.load(x + offsets, mask=in_bounds, other=0.0).to(tl.float32)
    dtype: tl.constexpr = out.dtype.element_ty
    if HAS_RESIDUAL:
        numbers = (numbers + tl.load(residual + offsets, mask=in_bounds, other=0.0).to(tl.float32)).to(dtype)
        tl.store(residual + offsets, numbers, mask=in_bounds)
        numbers = numbers.to(tl.float32)
    factor = tl.rsqrt(tl.sum(numbers * numbers, 0) / SIZE + eps)
    weights = tl.load(weight + i, mask=in_bounds, other=0.0).to(tl.float32)
    tl.store(out + offsets, (weights * (numbers * factor).to(dtype).to(tl.float32)).to(dtype), mask=in_bounds)


# silu(gate) * up, with gate and up side by side in one tensor. Each output depends on only two inputs, so
# a row can be split anywhere.
#
#     gate_up of row r    gate 0 .. 1023 | 1024 .. | up 0 .. 1023 | 1024 ..
#     program r,0         x                        x                         -> out 0 .. 1023
#     program r,1                          x                        x        -> out 1024 ..


def silu_and_mul(gate_up: Tensor, out: Tensor) -> None:
    """Launch the kernel for plain.silu_and_mul()."""
    rows, size = out.shape
    assert gate_up.shape == (rows, 2 * size), (gate_up.shape, out.shape)
    assert gate_up.is_contiguous() and out.is_contiguous()
    silu_and_mul_part[(rows, triton.cdiv(size, SILU_SIZE))](
        gate_up, out, SIZE=size, OUTPUTS=SILU_SIZE, num_warps=4, **EARLY_START_OPTIONS
    )


@triton.jit
def silu_and_mul_part(
    gate_up,  # [rows, 2 * size]
    out,  # [rows, size]
    SIZE: tl.constexpr,
    OUTPUTS: tl.constexpr,  # outputs per program
):
    """Compute part of one row. Silu is rounded before the multiplication, as in the model."""
    start_next_and_wait()
    row, i = tl.program_id(0).to(tl.int64), tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    in_bounds = i < SIZE
    dtype: tl.constexpr = out.dtype.element_ty
    gate = tl.load(gate_up + row * 2 * SIZE + i, mask=in_bounds, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * SIZE + SIZE + i, mask=in_bounds, other=0.0).to(tl.float32)
    silu = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32)
    tl.store(out + row * SIZE + i, (silu * up).to(dtype), mask=in_bounds)


# One kernel does everything between the qkv projection and attention: norm of heads, rotation, write to the pool. A
# program handles one row and one KV head: its group of query heads, its key and its value. With 4 query heads and 2 KV
# heads:
#
#     qkv of a row    q0   q1   q2   q3   k0   k1   v0   v1
#     program row,0   x    x              x         x            q0, q1 -> q_out    k0, v0 -> the row's slot
#     program row,1             x    x         x         x       q2, q3 -> q_out    k1, v1 -> the row's slot
#
# A head rotates in pairs (x[i], x[i + head_dim / 2]), so a program holds a head as two halves. The model's own
# operations would read and write every element of q and k about ten times, with a launch each time. Keys and values
# that the pool stores in 8 bits are rounded here.


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
    """Launch the kernel for plain.rotate_and_write()."""
    rows, num_heads, head_dim = q_out.shape
    block_size, num_kv_heads = PoolSizes.of(blocks, head_dim)
    group = num_heads // num_kv_heads
    assert qkv.shape == (rows, num_heads + 2 * num_kv_heads, head_dim), (qkv.shape, q_out.shape, num_kv_heads)
    assert qkv.is_contiguous() and q_out.is_contiguous() and cos.is_contiguous() and sin.is_contiguous()
    pool = layer_of(blocks, layer)
    rotate_and_write_row[(rows, num_kv_heads)](
        qkv, cos, sin, positions, slot_mapping, *pool, q_norm, k_norm, q_out, eps,
        GROUP=group, HEADS=triton.next_power_of_2(group), HALF=head_dim // 2,
        HALF_WIDTH=triton.next_power_of_2(head_dim // 2), BLOCK_SIZE=block_size, HAS_NORM=q_norm is not None,
        HAS_SCALES=pool[2] is not None, LARGEST=MAX_FP8 if blocks.dtype == FP8 else 0,
        num_warps=2, enable_fp_fusion=False,  # a product fused into a sum would not be rounded
        **EARLY_START_OPTIONS,
    )  # fmt: skip


@triton.jit
def normalize(first, second, weight, half, is_half, eps, SIZE: tl.constexpr, DTYPE: tl.constexpr):
    """Normalize heads that are held as two halves. The quotient is rounded, multiplied by weights, and rounded.

    first, second float32 [heads, HALF_WIDTH]; weight [SIZE], a pointer; half [HALF_WIDTH], indices into a half;
    is_half [HALF_WIDTH], False for padding
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
    """Rotate heads that are held as two halves. Both products are rounded before the sum.

    first, second [heads, HALF_WIDTH]; cos, sin [1, HALF_WIDTH]
    """
    left = (first * cos).to(DTYPE).to(tl.float32) - (second * sin).to(DTYPE).to(tl.float32)
    right = (second * cos).to(DTYPE).to(tl.float32) + (first * sin).to(DTYPE).to(tl.float32)
    return left.to(DTYPE), right.to(DTYPE)


@triton.jit
def load_rotated(
    heads,  # [heads, HALF_WIDTH], pointers to the first halves
    in_bounds,  # same shape as heads
    weight,  # [SIZE], the norm's, or None
    half,  # [HALF_WIDTH], indices into a half
    is_half,  # [HALF_WIDTH], False for padding
    cos,  # [1, HALF_WIDTH]
    sin,  # [1, HALF_WIDTH]
    eps,
    SIZE: tl.constexpr,
    HAS_NORM: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """Load heads, normalize them if there is a norm, rotate them, and return them as two halves."""
    first = tl.load(heads, mask=in_bounds, other=0.0).to(tl.float32)
    second = tl.load(heads + SIZE // 2, mask=in_bounds, other=0.0).to(tl.float32)
    if HAS_NORM:
        first, second = normalize(first, second, weight, half, is_half, eps, SIZE, DTYPE)
    return rotate(first, second, cos, sin, DTYPE)


@triton.jit
def store(to, numbers, is_stored, LARGEST: tl.constexpr):
    """Store numbers in the type of the pointers `to`. If LARGEST is not 0, larger ones become LARGEST."""
    if LARGEST:
        numbers = tl.clamp(numbers.to(tl.float32), -LARGEST, LARGEST, propagate_nan=tl.PropagateNan.ALL)
    tl.store(to, numbers.to(to.dtype.element_ty), mask=is_stored)


@triton.jit
def store_integers(to_first, to_second, to_scale, first, second, is_stored, has_scale):
    """Store a head, held as two halves, as int8 with a scale: the largest |number| / 127."""
    first, second = first.to(tl.float32), second.to(tl.float32)
    largest = tl.maximum(tl.max(tl.abs(first)), tl.max(tl.abs(second)))
    scale = tl.div_rn(largest, 127.0)
    divisor = tl.where(scale == 0.0, 1.0, scale)
    # a number below 2**22 is rounded, ties to even, when 1.5 * 2**23 is added
    tl.store(to_first, (tl.div_rn(first, divisor) + 12582912.0 - 12582912.0).to(tl.int8), mask=is_stored)
    tl.store(to_second, (tl.div_rn(second, divisor) + 12582912.0 - 12582912.0).to(tl.int8), mask=is_stored)
    tl.store(to_scale, scale, mask=has_scale)


@triton.jit(do_not_specialize=["positions", "slot_mapping"])
def rotate_and_write_row(
    qkv,  # [rows, num_heads + 2 * num_kv_heads, head_dim]
    cos,  # [max_model_len, head_dim]; the two halves of a row are equal
    sin,  # same shape as cos
    positions,  # int64 [rows]
    slot_mapping,  # int64 [rows]
    keys,  # of one layer, and the next four arguments: see layer_of(); output
    values,
    scales,
    block_stride,
    slot_stride,
    q_norm,  # [head_dim] or None
    k_norm,  # [head_dim] or None
    q_out,  # [rows, num_heads, head_dim], output
    eps,
    GROUP: tl.constexpr,  # query heads per KV head
    HEADS: tl.constexpr,  # GROUP, padded
    HALF: tl.constexpr,  # head_dim / 2
    HALF_WIDTH: tl.constexpr,  # HALF, padded
    BLOCK_SIZE: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    LARGEST: tl.constexpr,  # the largest number that the pool stores, or 0 if it stores what DTYPE has
):
    """Process one KV head of one row: its query heads, its key and its value."""
    start_next_and_wait()
    row, kv_head, num_kv_heads = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    DTYPE: tl.constexpr = q_out.dtype.element_ty
    SIZE: tl.constexpr = 2 * HALF
    slot = tl.load(slot_mapping + row)
    is_row = slot >= 0  # a padding row loads nothing, because its position may be any number
    head, half = tl.arange(0, HEADS), tl.arange(0, HALF_WIDTH)
    is_half = (half < HALF) & is_row  # [HALF_WIDTH]
    angle_offsets = tl.load(positions + row, mask=is_row, other=0) * SIZE + half
    c = tl.load(cos + angle_offsets, mask=is_half, other=0.0).to(DTYPE).to(tl.float32)[None, :]
    s = tl.load(sin + angle_offsets, mask=is_half, other=0.0).to(DTYPE).to(tl.float32)[None, :]

    qkv += row * (GROUP + 2) * num_kv_heads * SIZE  # now points to this row
    heads = (kv_head * GROUP + head)[:, None] * SIZE + half[None, :]  # [HEADS, HALF_WIDTH]
    is_query = (head < GROUP)[:, None] & is_half[None, :]
    first, second = load_rotated(qkv + heads, is_query, q_norm, half, is_half, c, s, eps, SIZE, HAS_NORM, DTYPE)
    is_query = (head < GROUP)[:, None] & (half < HALF)[None, :]  # padding rows store zeros
    q_out += row * GROUP * num_kv_heads * SIZE
    tl.store(q_out + heads, first, mask=is_query)
    tl.store(q_out + heads + HALF, second, mask=is_query)

    key = (GROUP * num_kv_heads + kv_head) * SIZE + half[None, :]  # [1, HALF_WIDTH]
    is_key = is_half[None, :]
    value = key + num_kv_heads * SIZE
    k_first, k_second = load_rotated(qkv + key, is_key, k_norm, half, is_half, c, s, eps, SIZE, HAS_NORM, DTYPE)
    v_first, v_second = tl.load(qkv + value, mask=is_key), tl.load(qkv + value + HALF, mask=is_key)
    block, offset = slot // BLOCK_SIZE, slot % BLOCK_SIZE
    if HAS_SCALES:  # int8_blocks.py has the layout
        start = block * block_stride + kv_head * BLOCK_SIZE * (2 * SIZE + 8)  # of the head, in bytes
        quad, token = start + offset // 4 * (4 * SIZE), offset % 4
        scale, dim, other = scales + start // 4 + BLOCK_SIZE * SIZE // 2 + offset, half[None, :], half[None, :] + HALF
        keys += quad + token * 4
        first, second = keys + dim // 4 * 16 + dim % 4, keys + other // 4 * 16 + other % 4
        store_integers(first, second, scale, k_first, k_second, is_key, is_row)
        values += quad + BLOCK_SIZE * SIZE + token
        store_integers(values + 4 * dim, values + 4 * other, scale + BLOCK_SIZE, v_first, v_second, is_key, is_row)
    else:
        offsets = block * block_stride + offset * slot_stride + kv_head * SIZE + half[None, :]
        store(keys + offsets, k_first, is_key, LARGEST)
        store(keys + offsets + HALF, k_second, is_key, LARGEST)
        store(values + offsets, v_first, is_key, LARGEST)
        store(values + offsets + HALF, v_second, is_key, LARGEST)


# A linear layer for one row.
#
#     weight          size ............................
#     outputs 0..3    program 0   tile, tile, tile ->     each program walks along its rows of the weight tile by tile,
#     outputs 4..7    program 1   tile, tile, tile ->     with a sum for each position in the tile
#     ...
#
# In decode the weight is far larger than x, so memory bandwidth is the limit and tensor cores would idle. Libraries
# tune matmuls for many rows, and for few rows, their tiles waste bandwidth at some shapes. Here, programs are small and
# many: a multiprocessor reads fast only while several of its programs wait for memory.
#
# A separate norm before the layer would take another launch, with a gap before it. For one row, each program can
# compute the norm itself: it needs the whole row of x, but that row is small, and programs read it from the cache.


def gemv(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, norm: NormBefore | None = None) -> None:
    """Launch the kernel for plain.gemv()."""
    size, outputs = x.shape[1], len(weight)
    assert weight.shape == (outputs, size) and out.shape == (1, outputs) == (len(x), outputs), (x.shape, weight.shape)
    assert x.is_contiguous() and weight.is_contiguous() and out.is_contiguous()
    launch_row(x, weight, bias, out, norm, outputs_per_program(outputs), GEMV_TILE, is_gated=False)


def gated_gemv(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, norm: NormBefore | None = None) -> None:
    """Launch one kernel for plain.gated_gemv(): for its outputs, each program reads the rows of both gate and up."""
    size, outputs = x.shape[1], out.shape[1]
    assert x.shape == (1, size) and out.shape == (1, outputs), (x.shape, out.shape)
    assert weight.shape == (2 * outputs, size), (x.shape, weight.shape, out.shape)
    assert x.is_contiguous() and weight.is_contiguous() and out.is_contiguous()
    launch_row(x, weight, bias, out, norm, max(1, outputs_per_program(outputs) // 2), GEMV_TILE // 2, is_gated=True)


def launch_row(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out: Tensor,
    norm: NormBefore | None,
    height: int,
    tile: int,
    is_gated: bool,
) -> None:
    """Launch multiply_row() with tiles of `height` rows and `tile` weights, or LONG_WIDTH columns for long rows."""
    size, outputs = x.shape[1], out.shape[1]
    residual, total, norm_weight, eps = norm or (None, None, None, 0.0)
    assert norm is None or (norm.residual.is_contiguous() and norm.total.is_contiguous())
    row_width, is_long = triton.next_power_of_2(size), size > LONG_ROW and not is_gated
    width = LONG_WIDTH if is_long else min(tile // height, row_width)
    multiply_row[(triton.cdiv(outputs, height),)](
        x, weight, bias, out, outputs, residual, total, norm_weight, eps, SIZE=size, HEIGHT=height,
        WIDTH=width, ROW_WIDTH=row_width, HAS_BIAS=bias is not None, IS_GATED=is_gated, HAS_NORM=norm is not None,
        num_warps=8 if is_long else 4, **EARLY_START_OPTIONS,
    )  # fmt: skip


def outputs_per_program(outputs: int) -> int:
    """Return the height of a tile: at most 4, and small enough for about 1000 programs, 8 per multiprocessor.

    >>> outputs_per_program(576), outputs_per_program(2048), outputs_per_program(4096), outputs_per_program(128256)
    (1, 2, 4, 4)
    """
    return max(1, min(4, int(triton.next_power_of_2(outputs // 1024))))


@triton.jit
def load_tile(rows, is_row, start, SIZE: tl.constexpr, WIDTH: tl.constexpr):
    """Return WIDTH weights of each row from column `start` on, and 0 past the end. rows [HEIGHT, 1], pointers."""
    i = start + tl.arange(0, WIDTH)
    mask = is_row[:, None] & (i < SIZE)[None, :]
    return tl.load(rows + i[None, :], mask=mask, other=0.0, eviction_policy="evict_first")


@triton.jit(do_not_specialize=["outputs"])
def multiply_row(
    x,  # [SIZE]
    weight,  # [outputs, SIZE]; if gated [2 * outputs, SIZE], the gate's rows first
    bias,  # [outputs] or [2 * outputs], like weight, or None
    out,  # [outputs]
    outputs,
    residual,  # [SIZE], or None
    total,  # [SIZE], output, or None
    norm_weight,  # [SIZE], or None
    eps,
    SIZE: tl.constexpr,
    HEIGHT: tl.constexpr,  # of a tile, in rows of the weight
    WIDTH: tl.constexpr,  # of a tile, in columns of the weight
    ROW_WIDTH: tl.constexpr,  # SIZE, padded
    HAS_BIAS: tl.constexpr,
    IS_GATED: tl.constexpr,
    HAS_NORM: tl.constexpr,
):
    """Compute HEIGHT outputs for one row. A thread holds the same columns of x and weight, so threads exchange neither.

    Each tile loads while the one before it is multiplied, and the first while the kernel waits for its inputs.
    """
    dtype: tl.constexpr = out.dtype.element_ty
    output = tl.program_id(0) * HEIGHT + tl.arange(0, HEIGHT)
    is_output = output < outputs
    starts = output.to(tl.int64)[:, None] * SIZE  # [HEIGHT, 1], where rows of the weight start
    up_weight = weight + outputs.to(tl.int64) * SIZE
    sums = tl.zeros([HEIGHT, WIDTH], tl.float32)
    up_sums = tl.zeros([HEIGHT, WIDTH], tl.float32)
    next_weights = load_tile(weight + starts, is_output, 0, SIZE, WIDTH)
    if IS_GATED:
        next_ups = load_tile(up_weight + starts, is_output, 0, SIZE, WIDTH)
    start_next_and_wait()
    if HAS_NORM:
        j = tl.arange(0, ROW_WIDTH)
        row = tl.load(x + j, mask=j < SIZE, other=0.0).to(tl.float32)
        row = (row + tl.load(residual + j, mask=j < SIZE, other=0.0).to(tl.float32)).to(dtype)
        tl.store(total + j, row, mask=(j < SIZE) & (tl.program_id(0) == 0))
        factor = tl.rsqrt(tl.sum(row.to(tl.float32) * row.to(tl.float32), 0) / SIZE + eps)
    for start in tl.range(0, SIZE, WIDTH, loop_unroll_factor=2):
        weights, next_weights = next_weights, load_tile(weight + starts, is_output, start + WIDTH, SIZE, WIDTH)
        if IS_GATED:
            ups, next_ups = next_ups, load_tile(up_weight + starts, is_output, start + WIDTH, SIZE, WIDTH)
        i = start + tl.arange(0, WIDTH)
        numbers = tl.load(x + i, mask=i < SIZE, other=0.0).to(tl.float32)  # [WIDTH]
        if HAS_NORM:  # rounded as in add_rms_norm_row()
            numbers = (numbers + tl.load(residual + i, mask=i < SIZE, other=0.0).to(tl.float32)).to(dtype)
            numbers = (numbers.to(tl.float32) * factor).to(dtype).to(tl.float32)
            numbers *= tl.load(norm_weight + i, mask=i < SIZE, other=0.0).to(tl.float32)
            numbers = numbers.to(dtype).to(tl.float32)
        sums += numbers[None, :] * weights.to(tl.float32)
        if IS_GATED:
            up_sums += numbers[None, :] * ups.to(tl.float32)
    result = tl.sum(sums, 1)  # [HEIGHT]
    if HAS_BIAS:
        result += tl.load(bias + output, mask=is_output, other=0.0).to(tl.float32)
    if IS_GATED:
        up = tl.sum(up_sums, 1)
        if HAS_BIAS:
            up += tl.load(bias + outputs + output, mask=is_output, other=0.0).to(tl.float32)
        gate = result.to(dtype).to(tl.float32)  # rounded as in separate kernels
        silu = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32)
        result = silu * up.to(dtype).to(tl.float32)
    tl.store(out + output, result.to(dtype), mask=is_output)
