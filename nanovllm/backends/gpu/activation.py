"""silu(gate) * up, from both side by side.

    gate_up of row r    gate 0 .. 1023 | 1024 .. | up 0 .. 1023 | 1024 ..
    program r,0         x                        x                         -> out 0 .. 1023
    program r,1                          x                        x        -> out 1024 ..

Each number is made from two others and from nothing else, so a row can be cut anywhere.
"""

import triton
import triton.language as tl
from torch import Tensor

NUMBERS = 1024  # of a program


def silu_and_mul(gate_up: Tensor, out: Tensor) -> None:
    """gate_up [rows, 2 * size]; out [rows, size]"""
    rows, size = out.shape
    assert gate_up.shape == (rows, 2 * size), (gate_up.shape, out.shape)
    assert gate_up.is_contiguous() and out.is_contiguous()
    silu_and_mul_part[(rows, triton.cdiv(size, NUMBERS))](gate_up, out, SIZE=size, NUMBERS=NUMBERS, num_warps=4)


@triton.jit
def silu_and_mul_part(
    gate_up,  # [rows, 2 * size]
    out,  # [rows, size]
    SIZE: tl.constexpr,
    NUMBERS: tl.constexpr,
):
    """Compute a part of one row. Silu is rounded before it is multiplied, as in the model itself."""
    row, i = tl.program_id(0).to(tl.int64), tl.program_id(1) * NUMBERS + tl.arange(0, NUMBERS)
    is_number = i < SIZE
    dtype: tl.constexpr = out.dtype.element_ty
    gate = tl.load(gate_up + row * 2 * SIZE + i, mask=is_number, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * SIZE + SIZE + i, mask=is_number, other=0.0).to(tl.float32)
    silu = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32)
    tl.store(out + row * SIZE + i, (silu * up).to(dtype), mask=is_number)
