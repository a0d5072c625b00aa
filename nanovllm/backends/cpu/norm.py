"""RMSNorm of a row."""

import numpy as np
from numba import njit

from .vectors import OPTIONS, WIDTH, Memory, fma, load, read, sum_of, write, zeros


@njit(**OPTIONS)
def normalize(x: Memory, weight: Memory, eps: float, size: int, out: Memory) -> None:
    """out = x / rms(x) * weight, [size] each. `out` may be x."""
    squares, i = zeros(), 0
    while i + WIDTH <= size:
        numbers = load(x, i)
        squares = fma(numbers, numbers, squares)
        i += WIDTH
    total = sum_of(squares)
    while i < size:
        total += read(x, i) * read(x, i)
        i += 1
    scale = np.float32(1) / np.sqrt(total / np.float32(size) + eps)
    for i in range(size):
        write(out, i, read(x, i) * scale * read(weight, i))
