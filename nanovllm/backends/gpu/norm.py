"""RMSNorm, and the sum before it: a layer adds to what came in, then normalizes.

    program r    row r:   residual + x -> residual    residual / rms * weight -> out

One program has one row, all of it at once: it needs the whole row for the sum of squares, and reads it once.
"""

import triton
import triton.language as tl
from torch import Tensor

NUMBERS_FOR_WARP = 512  # a warp is 32 threads; a GPU program has 1 to 16 of them here


def add_rms_norm(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, out: Tensor) -> None:
    """`residual` += x if there is one; out is the norm of it, else of x. `out` may be x.

    x, residual, out [rows, size]; weight [size]
    """
    rows, size = x.shape
    assert out.shape == x.shape and weight.shape == (size,), (x.shape, weight.shape, out.shape)
    assert x.is_contiguous() and out.is_contiguous() and (residual is None or residual.is_contiguous())
    width = triton.next_power_of_2(size)
    add_rms_norm_row[(rows,)](
        x, residual, weight, out, eps, SIZE=size, WIDTH=width, HAS_RESIDUAL=residual is not None,
        num_warps=max(1, min(16, width // NUMBERS_FOR_WARP)),
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
    """One row. Each result is rounded where the model's own is: the sum, the quotient, the product."""
    i = tl.arange(0, WIDTH)
    is_number = i < SIZE
    place = tl.program_id(0).to(tl.int64) * SIZE + i  # [WIDTH]
    numbers = tl.load(x + place, mask=is_number, other=0.0).to(tl.float32)
    dtype: tl.constexpr = out.dtype.element_ty
    if HAS_RESIDUAL:
        numbers = (numbers + tl.load(residual + place, mask=is_number, other=0.0).to(tl.float32)).to(dtype)
        tl.store(residual + place, numbers, mask=is_number)
        numbers = numbers.to(tl.float32)
    factor = tl.rsqrt(tl.sum(numbers * numbers, 0) / SIZE + eps)
    weights = tl.load(weight + i, mask=is_number, other=0.0).to(tl.float32)
    tl.store(out + place, (weights * (numbers * factor).to(dtype).to(tl.float32)).to(dtype), mask=is_number)
