"""A linear layer for one to four rows: x times a weight's rows, and each number of the weight is read once.

    weight          size ............................
    outputs 0..3    program 0   tile, tile, tile ->     each program goes along its rows of the weight, a tile at a time
    outputs 4..7    program 1   tile, tile, tile ->     and keeps one sum for each row of x and place in the tile
    ...

In decode a layer's weight is far more bytes than x, so the memory sets the pace and tensor cores would stand idle. A
library's matmul is made for many rows, and for few its choice of tiles leaves bandwidth unused at some shapes.
Programs are many and small here: a GPU's multiprocessors read fast only when each has several of them waiting.
"""

import triton
import triton.language as tl
from torch import Tensor

from .split import MAX_GEMV_ROWS

NUMBERS = 4096  # of a tile


def gemv(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """x [rows, size], at most MAX_GEMV_ROWS rows; weight [outputs, size]; bias [outputs]; out [rows, outputs]"""
    (rows, size), outputs = x.shape, len(weight)
    assert 1 <= rows <= MAX_GEMV_ROWS, f"{rows} rows, at most {MAX_GEMV_ROWS}"
    assert weight.shape[1] == size and out.shape == (rows, outputs), (x.shape, weight.shape, out.shape)
    assert x.is_contiguous() and weight.is_contiguous() and out.is_contiguous()
    height = outputs_of_program(outputs)
    if rows == 1:
        multiply_row[(triton.cdiv(outputs, height),)](
            x, weight, bias, out, outputs, SIZE=size, HEIGHT=height,
            WIDTH=min(NUMBERS // height, triton.next_power_of_2(size)), HAS_BIAS=bias is not None, IS_GATED=False,
            num_warps=4,
        )  # fmt: skip
        return
    multiply_part[(triton.cdiv(outputs, height),)](
        x, weight, bias, out, outputs, NUM_ROWS=rows, ROWS=triton.next_power_of_2(rows), SIZE=size, HEIGHT=height,
        WIDTH=min(NUMBERS // height, triton.next_power_of_2(size)), HAS_BIAS=bias is not None,
        num_warps=8 if rows > 2 else 4,
    )  # fmt: skip


def gated_gemv(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """silu(gate) * up of one row, without a kernel of its own: a program has the weight's rows of both.

    x [1, size]; weight [2 * outputs, size]; bias [2 * outputs]; out [1, outputs]
    """
    size, outputs = x.shape[1], out.shape[1]
    assert x.shape == (1, size) and out.shape == (1, outputs), (x.shape, out.shape)
    assert weight.shape == (2 * outputs, size), (x.shape, weight.shape, out.shape)
    assert x.is_contiguous() and weight.is_contiguous() and out.is_contiguous()
    height = max(1, outputs_of_program(outputs) // 2)
    multiply_row[(triton.cdiv(outputs, height),)](
        x, weight, bias, out, outputs, SIZE=size, HEIGHT=height,
        WIDTH=min(NUMBERS // 2 // height, triton.next_power_of_2(size)), HAS_BIAS=bias is not None, IS_GATED=True,
        num_warps=4,
    )  # fmt: skip


def outputs_of_program(outputs: int) -> int:
    """Few enough that a layer has a thousand programs, 8 for each multiprocessor; at most 4, a tile's rows are long.

    >>> outputs_of_program(576), outputs_of_program(2048), outputs_of_program(4096), outputs_of_program(128256)
    (1, 2, 4, 4)
    """
    return max(1, min(4, triton.next_power_of_2(outputs // 1024)))


@triton.jit(do_not_specialize=["outputs"])
def multiply_row(
    x,  # [SIZE]
    weight,  # [outputs, SIZE], or twice as many rows: of the gate, then of what it gates
    bias,  # as many as the weight has rows, or None
    out,  # [outputs]
    outputs,
    SIZE: tl.constexpr,
    HEIGHT: tl.constexpr,  # of a tile, in rows of the weight
    WIDTH: tl.constexpr,  # of a tile, in numbers of a row
    HAS_BIAS: tl.constexpr,
    IS_GATED: tl.constexpr,
):
    """HEIGHT outputs of one row. A thread has the same columns of x and of the weight: nothing is passed around."""
    dtype: tl.constexpr = out.dtype.element_ty
    output = tl.program_id(0) * HEIGHT + tl.arange(0, HEIGHT)
    is_output = output < outputs
    starts = output.to(tl.int64)[:, None] * SIZE  # [HEIGHT, 1], of the weight's rows
    up_weight = weight + outputs.to(tl.int64) * SIZE
    sums = tl.zeros([HEIGHT, WIDTH], tl.float32)
    up_sums = tl.zeros([HEIGHT, WIDTH], tl.float32)
    for start in range(0, SIZE, WIDTH):
        i = start + tl.arange(0, WIDTH)
        is_weight = is_output[:, None] & (i < SIZE)[None, :]  # [HEIGHT, WIDTH]
        weights = tl.load(weight + starts + i[None, :], mask=is_weight, other=0.0, eviction_policy="evict_first")
        if IS_GATED:
            ups = tl.load(up_weight + starts + i[None, :], mask=is_weight, other=0.0, eviction_policy="evict_first")
        numbers = tl.load(x + i, mask=i < SIZE, other=0.0).to(tl.float32)[None, :]  # [1, WIDTH]
        sums += numbers * weights.to(tl.float32)
        if IS_GATED:
            up_sums += numbers * ups.to(tl.float32)
    result = tl.sum(sums, 1)  # [HEIGHT]
    if HAS_BIAS:
        result += tl.load(bias + output, mask=is_output, other=0.0).to(tl.float32)
    if IS_GATED:
        up = tl.sum(up_sums, 1)
        if HAS_BIAS:
            up += tl.load(bias + outputs + output, mask=is_output, other=0.0).to(tl.float32)
        gate = result.to(dtype).to(tl.float32)  # each is rounded where the layers that stand alone round
        silu = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32)
        result = silu * up.to(dtype).to(tl.float32)
    tl.store(out + output, result.to(dtype), mask=is_output)


@triton.jit
def multiply_part(
    x,  # [NUM_ROWS, SIZE]
    weight,  # [outputs, SIZE]
    bias,  # [outputs], or None
    out,  # [NUM_ROWS, outputs]
    outputs,
    NUM_ROWS: tl.constexpr,
    ROWS: tl.constexpr,  # NUM_ROWS, padded
    SIZE: tl.constexpr,
    HEIGHT: tl.constexpr,  # of a tile, in rows of the weight
    WIDTH: tl.constexpr,  # of a tile, in numbers of a row
    HAS_BIAS: tl.constexpr,
):
    """HEIGHT outputs of all rows of x. Products are summed in float32."""
    row, output = tl.arange(0, ROWS), tl.program_id(0) * HEIGHT + tl.arange(0, HEIGHT)
    starts = output.to(tl.int64)[:, None] * SIZE  # [HEIGHT, 1], of the weight's rows
    sums = tl.zeros([ROWS, HEIGHT, WIDTH], tl.float32)
    for start in range(0, SIZE, WIDTH):
        i = start + tl.arange(0, WIDTH)
        is_weight = (output < outputs)[:, None] & (i < SIZE)[None, :]
        is_number = (row < NUM_ROWS)[:, None] & (i < SIZE)[None, :]
        weights = tl.load(weight + starts + i[None, :], mask=is_weight, other=0.0).to(tl.float32)  # [HEIGHT, WIDTH]
        numbers = tl.load(x + row[:, None] * SIZE + i[None, :], mask=is_number, other=0.0).to(tl.float32)  # [ROWS, ...]
        sums += numbers[:, None, :] * weights[None, :, :]
    result = tl.sum(sums, 2)  # [ROWS, HEIGHT]
    if HAS_BIAS:
        result += tl.load(bias + output, mask=output < outputs, other=0.0).to(tl.float32)[None, :]
    is_result = (row < NUM_ROWS)[:, None] & (output < outputs)[None, :]
    tl.store(out + row[:, None] * outputs + output[None, :], result.to(out.dtype.element_ty), mask=is_result)
