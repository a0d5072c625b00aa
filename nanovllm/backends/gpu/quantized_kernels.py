"""A linear layer whose weight has 8 or 4 bits, in Triton. quantization.py describes the weight's layout.

    weight          groups of 32 numbers ...........
    outputs 0..15   program 0   tile, tile, tile ->     each program turns its rows of the weight into numbers of the
    outputs 16..31  program 1   tile, tile, tile ->     model's type, tile by tile, and multiplies them
    ...

The integers become numbers in registers, so a step reads a half or a quarter of the bytes. One to four rows are
multiplied as in gemv(), and more of them by tensor cores. A prompt has several tiles of rows, each of which reads the
weight again. Read attention_kernels.py first: it explains Triton.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...quantization import Format, QuantizedLinear
from .early_start import EARLY_START_OPTIONS, start_next_and_wait
from .tiles import MAX_GEMV_ROWS, ROW_TILES


def quantized_gemm(x: Tensor, layer: QuantizedLinear, out: Tensor) -> None:
    """Launch the kernel for plain.quantized_gemm(), for any number of rows."""
    (rows, size), outputs, format = x.shape, layer.out_features, layer.format
    assert size == layer.in_features and out.shape == (rows, outputs), (x.shape, outputs, out.shape)
    assert x.is_contiguous() and out.is_contiguous()
    params = layer.scales if format == Format.INT8 else layer.values  # where the scales and minima are
    tile = next((tile for tile in ROW_TILES if rows <= tile), ROW_TILES[-1])
    height = 16 if tile < ROW_TILES[-1] else 64
    multiply_integers[(triton.cdiv(outputs, height), triton.cdiv(rows, tile))](
        x, layer.values, params.view(torch.bfloat16 if format == Format.INT4 else torch.float32), layer.bias, out,
        rows, outputs, size, FORMAT=int(format), IN_GROUPS=format != Format.INT8, BITS=format.bits,
        HAS_MINIMA=format.has_minima, HAS_HALVES=format >= Format.INT8_HALF_GROUPS, ROWS=tile, HEIGHT=height, GROUPS=4,
        HAS_BIAS=layer.bias is not None, USES_DOT=tile > MAX_GEMV_ROWS, num_warps=4, num_stages=4,
        **EARLY_START_OPTIONS,
    )  # fmt: skip


@triton.jit
def load_params(params, at, is_group, number, HAS_HALVES: tl.constexpr):
    """Return the scale or minimum of each number of a tile, float32 [HEIGHT, GROUPS, 1], or 32 if halves differ.

    at [HEIGHT, GROUPS], of a group's first one; that of its second half is a line further; number [1, 1, 32]
    """
    first = tl.load(params + at, mask=is_group, other=0.0).to(tl.float32)[:, :, None]
    if HAS_HALVES:
        second = tl.load(params + at + 16, mask=is_group, other=0.0).to(tl.float32)[:, :, None]
        first = tl.where(number < 16, first, second)
    return first


@triton.jit(do_not_specialize=["rows"])
def multiply_integers(
    x,  # [rows, size]
    values,  # uint8, the lines of the weight
    params,  # the same as float32 or, for int4, bfloat16; for INT8 float32 [outputs, padded]
    bias,  # [outputs], or None
    out,  # [rows, outputs]
    rows,
    outputs,
    size,
    FORMAT: tl.constexpr,  # lines per group
    IN_GROUPS: tl.constexpr,  # whether groups have scales
    BITS: tl.constexpr,  # also the lines of a group's integers
    HAS_MINIMA: tl.constexpr,
    HAS_HALVES: tl.constexpr,  # whether the halves of a group have scales of their own
    ROWS: tl.constexpr,  # of x, in a tile
    HEIGHT: tl.constexpr,  # rows of the weight in a tile
    GROUPS: tl.constexpr,  # groups of a row in a tile
    HAS_BIAS: tl.constexpr,
    USES_DOT: tl.constexpr,
):
    """Compute HEIGHT outputs for ROWS rows. Products are summed in float32."""
    start_next_and_wait()
    DTYPE: tl.constexpr = out.dtype.element_ty
    WIDTH: tl.constexpr = GROUPS * 32
    row, output = tl.program_id(1) * ROWS + tl.arange(0, ROWS), tl.program_id(0) * HEIGHT + tl.arange(0, HEIGHT)
    is_row, is_output = (row < rows)[:, None], (output < outputs)[:, None]
    number = tl.arange(0, 32)[None, None, :]  # in a group
    line_of_number = number // (32 // BITS)
    first_line = (output // 16).to(tl.int64) * (size // 32 * FORMAT)  # of the column
    sums = tl.zeros([ROWS, HEIGHT] if USES_DOT else [ROWS, HEIGHT, WIDTH], tl.float32)
    for start in tl.range(0, size // 32, GROUPS):
        group = start + tl.arange(0, GROUPS)[None, :]
        is_group = is_output & (group < size // 32)  # [HEIGHT, GROUPS]
        line = first_line[:, None] + group * FORMAT
        offsets = ((line[:, :, None] + line_of_number) * 16 + (output % 16)[:, None, None]) * 4 + number % 4
        q = tl.load(values + offsets, mask=is_group[:, :, None], other=0)  # uint8 [HEIGHT, GROUPS, 32]
        if BITS == 4:
            q = q >> (number // 4 % 2 * 4).to(tl.uint8) & 15
        weights = q.to(tl.float32)
        if BITS == 8:
            weights -= 128.0
        if IN_GROUPS:
            at = (line + BITS) * 16 + (output % 16)[:, None]
            if FORMAT == 5:  # INT4: pairs
                scale = load_params(params, 2 * at, is_group, number, False)
                minimum = load_params(params, 2 * at + 1, is_group, number, False)
            else:
                scale = load_params(params, at, is_group, number, HAS_HALVES)
                if HAS_MINIMA:
                    minimum = load_params(params, at + (32 if HAS_HALVES else 16), is_group, number, HAS_HALVES)
            weights = weights * scale
            if HAS_MINIMA:
                weights += minimum
        tile = tl.reshape(weights, [HEIGHT, WIDTH]).to(DTYPE)
        i = start * 32 + tl.arange(0, WIDTH)[None, :]
        numbers = tl.load(x + row[:, None] * size + i, mask=is_row & (i < size), other=0.0)  # [ROWS, WIDTH]
        if USES_DOT:
            sums = tl.dot(numbers, tl.trans(tile), sums, input_precision="ieee")
        else:
            sums += numbers[:, None, :].to(tl.float32) * tile[None, :, :].to(tl.float32)
    result = sums if USES_DOT else tl.sum(sums, 2)  # [ROWS, HEIGHT]
    if not IN_GROUPS:
        result *= tl.load(params + output, mask=output < outputs, other=0.0)[None, :]
    if HAS_BIAS:
        result += tl.load(bias + output, mask=output < outputs, other=0.0).to(tl.float32)[None, :]
    is_result = is_row & (output < outputs)[None, :]
    tl.store(out + row[:, None] * outputs + output[None, :], result.to(DTYPE), mask=is_result)
