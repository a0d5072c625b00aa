"""silu(gate) * up: what stands between the two halves of an MLP."""

import numpy as np
from numba import njit

from .exp import exp
from .lanes import divide, exp_of, negative
from .vectors import OPTIONS, WIDTH, Memory, add, load, maximum, multiply, read, splat, store, write

LOWEST = np.float32(-88.0)  # exp(88) is float32's last power; silu of less is 0


@njit(**OPTIONS)
def silu_and_mul(gate: Memory, up: Memory, size: int, out: Memory) -> None:
    """out = silu(gate) * up, [size] each. silu(x) = x / (1 + exp(-x))"""
    i = 0
    while i + WIDTH <= size:
        numbers = load(gate, i)
        below = add(exp_of(negative(maximum(numbers, splat(LOWEST)))), splat(np.float32(1)))
        store(out, i, multiply(divide(numbers, below), load(up, i)))
        i += WIDTH
    while i < size:
        number = read(gate, i)
        write(out, i, number / (np.float32(1) + exp(-number)) * read(up, i))
        i += 1
