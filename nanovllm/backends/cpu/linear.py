"""Some rows of a weight times a few rows of x."""

from numba import njit

from .dot import products
from .vectors import OPTIONS, Memory, at, read, write


@njit(**OPTIONS)
def linear(
    weight: Memory, bias: Memory, has_bias: bool, start: int, end: int, x: Memory, size: int, rows: int, out: Memory,
    outputs: int,
) -> None:  # fmt: skip
    """out[m, r] = weight[r] * x[m] + bias[r] for r in start .. end - 1

    weight [outputs, size]; bias [outputs]; x [rows, size], at most 4 rows; out float32 [rows, outputs]
    """
    for r in range(start, end):
        products(at(weight, r * size), x, size, rows, at(out, r), outputs)
    if has_bias:
        for m in range(rows):
            for r in range(start, end):
                write(out, m * outputs + r, read(out, m * outputs + r) + read(bias, r))
