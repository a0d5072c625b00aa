"""A linear layer for several rows, whose weight may also have 8 or 4 bits, in Triton.

    weight          groups of 32 numbers ...........
    outputs 0..15   program 0   tile, tile, tile ->     each program multiplies its rows of the weight with all rows of
    outputs 16..31  program 1   tile, tile, tile ->     x, tile by tile, in tensor cores
    ...

In decode, the weight is far larger than x, so its bytes decide how long a layer takes. While the kernel waits for x,
its programs begin to read the weight into the GPU's cache. More than 64 rows have several tiles of rows, each of which
reads the weight again.

Integers become numbers of the model's type in registers, so a step reads a half or a quarter of the bytes.
quantization.py describes their layout. Read attention_kernels.py first: it explains Triton.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

from ...quantization import Format, QuantizedLinear
from .early_start import EARLY_START_OPTIONS, prefetch, start_next_and_wait
from .tiles import ROW_TILES, choose_height, row_tile


def gemm(x: Tensor, layer: nn.Linear | QuantizedLinear, out: Tensor) -> None:
    """Launch the kernel for plain.gemm(), for any number of rows."""
    (rows, size), outputs = x.shape, layer.out_features
    assert size == layer.in_features and out.shape == (rows, outputs), (x.shape, outputs, out.shape)
    assert x.is_contiguous() and out.is_contiguous()
    tile = row_tile(rows) or ROW_TILES[-1]
    height = choose_height(outputs, tile, rows > tile)
    weight: Tensor = layer.values if isinstance(layer, QuantizedLinear) else layer.weight
    params, constants = None, {"FORMAT": 0, "BITS": 16, "HAS_MINIMA": False}
    if isinstance(layer, QuantizedLinear):
        format = layer.format
        params = layer.scales if format == Format.INT8 else weight  # where the scales and minima are
        params = params.view(torch.bfloat16 if format == Format.INT4 else torch.float32)
        constants = {"FORMAT": int(format), "BITS": format.bits, "HAS_MINIMA": format.has_minima}
    multiply_tiles[(triton.cdiv(outputs, height), triton.cdiv(rows, tile))](
        x, weight, params, layer.bias, out, rows, outputs, size, ROWS=tile, HEIGHT=height,
        GROUPS=8 // x.element_size(), HAS_BIAS=layer.bias is not None, USES_DOT=tile > 1, num_warps=4,
        num_stages=3 if constants["FORMAT"] > 9 else 4,  # an L4 has no room for more
        **constants, **EARLY_START_OPTIONS,
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
def multiply_tiles(
    x,  # [rows, size]
    weight,  # [outputs, size], or uint8, the lines of an integer weight
    params,  # the lines as float32 or, for int4, bfloat16; for INT8 float32 [outputs, padded]; or None
    bias,  # [outputs], or None
    out,  # [rows, outputs]
    rows,
    outputs,
    size,
    FORMAT: tl.constexpr,  # lines per group, or 0 if the weight has numbers of the model's type
    BITS: tl.constexpr,  # of a number of the weight; also the lines of a group's integers
    HAS_MINIMA: tl.constexpr,
    ROWS: tl.constexpr,  # of x, in a tile
    HEIGHT: tl.constexpr,  # rows of the weight in a tile
    GROUPS: tl.constexpr,  # groups of a row in a tile
    HAS_BIAS: tl.constexpr,
    USES_DOT: tl.constexpr,
):
    """Compute HEIGHT outputs for ROWS rows. Products are summed in float32."""
    DTYPE: tl.constexpr = out.dtype.element_ty
    WIDTH: tl.constexpr = GROUPS * 32
    HAS_HALVES: tl.constexpr = FORMAT >= 10  # whether the halves of a group have scales of their own
    row, output = tl.program_id(1) * ROWS + tl.arange(0, ROWS), tl.program_id(0) * HEIGHT + tl.arange(0, HEIGHT)
    is_row, is_output = (row < rows)[:, None], (output < outputs)[:, None]
    number = tl.arange(0, 32)[None, None, :]  # in a group
    line_of_number = number // (32 // BITS)
    first_line = (output // 16).to(tl.int64) * (size // 32 * FORMAT)  # of the column
    starts = output.to(tl.int64)[:, None] * size  # [HEIGHT, 1], where rows of the weight start
    if FORMAT == 0:
        prefetch(weight, weight + starts, starts * 0, 64, size, is_output)
    else:  # 16 outputs share a column, and divide its lines among them
        run, length = weight + first_line[:, None] * 64, size // 32 * FORMAT * 64
        prefetch(weight, run, (output % 16 * 128)[:, None], 2048, length, is_output)
    start_next_and_wait()
    sums = tl.zeros([ROWS, HEIGHT] if USES_DOT else [ROWS, HEIGHT, WIDTH], tl.float32)
    for start in tl.range(0, tl.cdiv(size, 32), GROUPS):
        i = start * 32 + tl.arange(0, WIDTH)[None, :]
        if FORMAT == 0:
            tile = tl.load(weight + starts + i, mask=is_output & (i < size), other=0.0)  # [HEIGHT, WIDTH]
        else:
            group = start + tl.arange(0, GROUPS)[None, :]
            is_group = is_output & (group < size // 32)  # [HEIGHT, GROUPS]
            line = first_line[:, None] + group * FORMAT
            offsets = ((line[:, :, None] + line_of_number) * 16 + (output % 16)[:, None, None]) * 4 + number % 4
            q = tl.load(weight + offsets, mask=is_group[:, :, None], other=0)  # uint8 [HEIGHT, GROUPS, 32]
            if BITS == 4:
                q = q >> (number // 4 % 2 * 4).to(tl.uint8) & 15
            numbers_of_q = q.to(tl.float32)
            if BITS == 8:
                numbers_of_q -= 128.0
            if FORMAT != 8:
                at = (line + BITS) * 16 + (output % 16)[:, None]
                if FORMAT == 5:  # INT4: pairs
                    scale = load_params(params, 2 * at, is_group, number, False)
                    minimum = load_params(params, 2 * at + 1, is_group, number, False)
                else:
                    scale = load_params(params, at, is_group, number, HAS_HALVES)
                    if HAS_MINIMA:
                        minimum = load_params(params, at + (32 if HAS_HALVES else 16), is_group, number, HAS_HALVES)
                numbers_of_q = numbers_of_q * scale
                if HAS_MINIMA:
                    numbers_of_q += minimum
            tile = tl.reshape(numbers_of_q, [HEIGHT, WIDTH]).to(DTYPE)
        numbers = tl.load(x + row[:, None] * size + i, mask=is_row & (i < size), other=0.0)  # [ROWS, WIDTH]
        if USES_DOT:
            sums = tl.dot(numbers, tl.trans(tile), sums, input_precision="ieee")
        else:
            sums += numbers[:, None, :].to(tl.float32) * tile[None, :, :].to(tl.float32)
    result = sums if USES_DOT else tl.sum(sums, 2)  # [ROWS, HEIGHT]
    if FORMAT == 8:
        result *= tl.load(params + output, mask=output < outputs, other=0.0)[None, :]
    if HAS_BIAS:
        result += tl.load(bias + output, mask=output < outputs, other=0.0).to(tl.float32)[None, :]
    is_result = is_row & (output < outputs)[None, :]
    tl.store(out + row[:, None] * outputs + output[None, :], result.to(DTYPE), mask=is_result)
