"""The operations on rows between the matmuls of a layer: RMSNorm, rotary embedding, SiLU.

Rows may have any size: they are processed in vectors of sixteen numbers, and the rest one by one.
"""

import numpy as np

from .layout import WIDTH
from .vectors import (
    Memory,
    add,
    divide,
    exp,
    exp_of,
    floats,
    fma,
    kernel,
    load,
    maximum,
    multiply,
    negative,
    read,
    splat,
    store,
    sum_of,
    write,
    zeros,
)

LOWEST_GATE = np.float32(-88.0)  # exp(89) overflows in float32; silu of lower numbers is practically 0

# RMSNorm


@kernel
def rms_norm(x: Memory, weight: Memory, eps: float, size: int, out: Memory) -> None:
    """Set out to x / rms(x) * weight, [size] each. `out` may be x."""
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
    i = 0
    while i + WIDTH <= size:
        store(out, i, multiply(multiply(load(x, i), splat(scale)), load(weight, i)))
        i += WIDTH
    while i < size:
        write(out, i, read(x, i) * scale * read(weight, i))
        i += 1


# Rotary embedding


@kernel
def norm_and_rotate(
    x: Memory, norm: int, cos: Memory, sin: Memory, eps: float, scale: float, size: int, scratch: Memory, out: Memory
) -> None:
    """Normalize, rotate and scale a head. x, out [size]; scratch float32 [size].

    `norm` is the address of float32 [size], or 0 if the model has no head norms.
    """
    if norm:
        rms_norm(x, floats(norm), eps, size, scratch)
        rotate(scratch, cos, sin, scale, size, out)
    else:
        rotate(x, cos, sin, scale, size, out)


@kernel
def rotate(x: Memory, cos: Memory, sin: Memory, scale: float, size: int, out: Memory) -> None:
    """Rotate each pair (x[i], x[i + size / 2]) by its angle, and scale it.

    x, out [size]; cos, sin [at least size / 2]. `out` must not be x.
    """
    half, i = size // 2, 0
    while i + WIDTH <= half:
        a, b = multiply(load(x, i), splat(scale)), multiply(load(x, half + i), splat(scale))
        c, s = load(cos, i), load(sin, i)
        store(out, i, fma(a, c, multiply(b, negative(s))))
        store(out, half + i, fma(b, c, multiply(a, s)))
        i += WIDTH
    while i < half:
        a, b = read(x, i) * np.float32(scale), read(x, half + i) * np.float32(scale)
        c, s = read(cos, i), read(sin, i)
        write(out, i, a * c - b * s)
        write(out, half + i, b * c + a * s)
        i += 1


@kernel
def copy(x: Memory, size: int, scale: float, out: Memory) -> None:
    """Set out to scale * x, [size] each, converting between any two types."""
    i = 0
    while i + WIDTH <= size:
        store(out, i, multiply(load(x, i), splat(scale)))
        i += WIDTH
    while i < size:
        write(out, i, read(x, i) * np.float32(scale))
        i += 1


# SiLU


@kernel
def silu_and_mul(gate: Memory, up: Memory, size: int, out: Memory) -> None:
    """Set out to silu(gate) * up, [size] each, where silu(x) = x / (1 + exp(-x))."""
    i = 0
    while i + WIDTH <= size:
        numbers = load(gate, i)
        below = add(exp_of(negative(maximum(numbers, splat(LOWEST_GATE)))), splat(np.float32(1)))
        store(out, i, multiply(divide(numbers, below), load(up, i)))
        i += WIDTH
    while i < size:
        number = read(gate, i)
        write(out, i, number / (np.float32(1) + exp(-number)) * read(up, i))
        i += 1
