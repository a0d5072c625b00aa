"""A linear layer for several rows, whose weight may also have 8 to 4 bits, in Triton.

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

from types import SimpleNamespace

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

from ...quantization import QuantizedLinear
from .early_start import EARLY_START_OPTIONS, prefetch, start_next_and_wait
from .tiles import ROW_TILES, choose_height, row_tile

# A floating-point weight, as a Format
FLOATS = SimpleNamespace(lines=0, bits=16, parts=1, zero_point=0, has_minima=False, groups=1, dtype=torch.float32)

PARAMS = {torch.float16: tl.float16, torch.float32: tl.float32, torch.int8: tl.int8}  # types of scales and minima


def gemm(x: Tensor, layer: nn.Linear | QuantizedLinear, out: Tensor) -> None:
    """Launch the kernel for plain.gemm(), for any number of rows."""
    (rows, size), outputs = x.shape, layer.out_features
    assert size == layer.in_features and out.shape == (rows, outputs), (x.shape, outputs, out.shape)
    assert x.is_contiguous() and out.is_contiguous()
    tile = row_tile(rows) or ROW_TILES[-1]
    height = choose_height(outputs, tile, rows > tile)
    format = layer.format if isinstance(layer, QuantizedLinear) else FLOATS
    weight = layer.values if isinstance(layer, QuantizedLinear) else layer.weight
    scales = layer.scales.view(torch.float32) if isinstance(layer, QuantizedLinear) else None
    multiply_tiles[(triton.cdiv(outputs, height), triton.cdiv(rows, tile))](
        x, weight, scales, layer.bias, out, rows, outputs, size, LINES=format.lines, BITS=format.bits,
        PARTS=format.parts, ZERO=format.zero_point, HAS_MINIMA=format.has_minima, BLOCK=format.groups,
        PARAMS=PARAMS[format.dtype], ROWS=tile, HEIGHT=height,
        GROUPS=8 // x.element_size(), HAS_BIAS=layer.bias is not None, USES_DOT=tile > 1, num_warps=4,
        num_stages=3 + (format.groups * format.parts == 1 and format.bits != 5), **EARLY_START_OPTIONS,  # to fit an L4
    )  # fmt: skip


@triton.jit
def load_params(values, line, place, is_group, number, PARTS: tl.constexpr, DTYPE: tl.constexpr):
    """Return the scale, minimum or factor of each number: float32 [HEIGHT, GROUPS, 1], or 32 where halves differ.

    line [HEIGHT, GROUPS], of each group's params; place [HEIGHT, 1 or GROUPS], of the output's first one among the
    numbers from there on, which are of type DTYPE; that of a group's second half is 16 further; number [1, 1, 32]
    """
    params = values.to(tl.pointer_type(DTYPE)) + line * (512 // DTYPE.primitive_bitwidth) + place
    first = tl.load(params, mask=is_group, other=0).to(tl.float32)[:, :, None]
    if PARTS == 2:
        second = tl.load(params + 16, mask=is_group, other=0).to(tl.float32)[:, :, None]
        first = tl.where(number < 16, first, second)
    return first


@triton.jit(do_not_specialize=["rows"])
def multiply_tiles(
    x,  # [rows, size]
    weight,  # [outputs, size], or uint8, the lines of an integer weight
    scales,  # float32 [outputs, padded] for INT8; otherwise empty, or None
    bias,  # [outputs], or None
    out,  # [rows, outputs]
    rows,
    outputs,
    size,
    LINES: tl.constexpr,  # per block, or 0 if the weight is not integers; the next ones are also those of a Format
    BITS: tl.constexpr,
    PARTS: tl.constexpr,
    ZERO: tl.constexpr,
    HAS_MINIMA: tl.constexpr,
    BLOCK: tl.constexpr,  # groups
    PARAMS: tl.constexpr,  # the type of scales and minima
    ROWS: tl.constexpr,  # of x, in a tile
    HEIGHT: tl.constexpr,  # rows of the weight in a tile
    GROUPS: tl.constexpr,  # groups of a row in a tile
    HAS_BIAS: tl.constexpr,
    USES_DOT: tl.constexpr,
):
    """Compute HEIGHT outputs for ROWS rows. Products are summed in float32."""
    DTYPE: tl.constexpr = out.dtype.element_ty
    WIDTH: tl.constexpr = GROUPS * 32
    row, output = tl.program_id(1) * ROWS + tl.arange(0, ROWS), tl.program_id(0) * HEIGHT + tl.arange(0, HEIGHT)
    is_row, is_output = (row < rows)[:, None], (output < outputs)[:, None]
    number = tl.arange(0, 32)[None, None, :]  # in a group
    NIBBLES: tl.constexpr = 8 if BITS == 8 else 4  # lines of lower or whole integers
    line_of_number = number // (32 // NIBBLES)
    first_line = (output // 16).to(tl.int64) * (size // (32 * BLOCK) * LINES)  # of the column
    lane, starts = (output % 16)[:, None], output.to(tl.int64)[:, None] * size  # [HEIGHT, 1]; starts of rows
    if LINES == 0:
        prefetch(weight, weight + starts, starts * 0, 64, size, is_output)
    else:  # 16 outputs share a column, and divide its lines among them
        column_bytes = size // (32 * BLOCK) * LINES * 64
        prefetch(weight, weight + first_line[:, None] * 64, lane * 128, 2048, column_bytes, is_output)
    start_next_and_wait()
    sums = tl.zeros([ROWS, HEIGHT] if USES_DOT else [ROWS, HEIGHT, WIDTH], tl.float32)
    for start in tl.range(0, tl.cdiv(size, 32), GROUPS):
        i = start * 32 + tl.arange(0, WIDTH)[None, :]
        if LINES == 0:
            tile = tl.load(weight + starts + i, mask=is_output & (i < size), other=0.0)  # [HEIGHT, WIDTH]
        else:
            group = start + tl.arange(0, GROUPS)[None, :]
            is_group = is_output & (group < size // 32)  # [HEIGHT, GROUPS]
            block, group_of_block = first_line[:, None] + group // BLOCK * LINES, group % BLOCK
            line = block + group_of_block * BITS
            byte = line[:, :, None] * 64 + lane[:, :, None] * 4 + number % 4  # in a group's first line
            q = tl.load(weight + byte + line_of_number * 64, mask=is_group[:, :, None], other=0)  # uint8
            if BITS < 8:
                q = q >> (number // 4 % 2 * 4).to(tl.uint8) & 15
            if BITS == 5:
                upper = tl.load(weight + byte + 4 * 64, mask=is_group[:, :, None], other=0)
                q += (upper >> (number // 4).to(tl.uint8) & 1) << 4
            if BITS == 6:
                upper = tl.load(weight + byte + (4 + number // 16) * 64, mask=is_group[:, :, None], other=0)
                q += (upper >> (number // 4 % 4 * 2).to(tl.uint8) & 3) << 4
            numbers_of_q = q.to(tl.float32) - ZERO
            if LINES > BITS:
                params = block + BLOCK * BITS  # the line where scales and minima begin
                place, last = lane + group_of_block * ((2 if HAS_MINIMA else 1) * PARTS * 16), block + LINES - 1
                scale = load_params(weight, params, place, is_group, number, PARTS, PARAMS)
                if BLOCK > 1:  # the last line has factors
                    scale *= load_params(weight, last, lane, is_group, number, 1, tl.float16)
                numbers_of_q = numbers_of_q * scale
                if HAS_MINIMA:
                    minimum = load_params(weight, params, place + 16 * PARTS, is_group, number, PARTS, PARAMS)
                    if BLOCK > 1:
                        minimum *= load_params(weight, last, lane + 16, is_group, number, 1, tl.float16)
                    numbers_of_q += minimum
            tile = tl.reshape(numbers_of_q, [HEIGHT, WIDTH]).to(DTYPE)
        numbers = tl.load(x + row[:, None] * size + i, mask=is_row & (i < size), other=0.0)  # [ROWS, WIDTH]
        if USES_DOT:
            sums = tl.dot(numbers, tl.trans(tile), sums, input_precision="ieee")
        else:
            sums += numbers[:, None, :].to(tl.float32) * tile[None, :, :].to(tl.float32)
    result = sums if USES_DOT else tl.sum(sums, 2)  # [ROWS, HEIGHT]
    if LINES == BITS:
        result *= tl.load(scales + output, mask=output < outputs, other=0.0)[None, :]
    if HAS_BIAS:
        result += tl.load(bias + output, mask=output < outputs, other=0.0).to(tl.float32)[None, :]
    is_result = is_row & (output < outputs)[None, :]
    tl.store(out + row[:, None] * outputs + output[None, :], result.to(DTYPE), mask=is_result)
