"""A head's norm, its rotation by its position's angles, and its scale."""

import numpy as np
from numba import njit

from .lanes import negative
from .norm import normalize
from .vectors import OPTIONS, WIDTH, Memory, fma, load, multiply, read, splat, store, write


@njit(**OPTIONS)
def turn(
    x: Memory, norm: Memory, has_norm: bool, cos: Memory, sin: Memory, eps: float, scale: float, size: int, own: Memory,
    out: Memory,
) -> None:  # fmt: skip
    """Norm, rotate and scale a head. x, norm, out [size]; own float32 [size]: room to work in"""
    if has_norm:
        normalize(x, norm, eps, size, own)
        rotate(own, cos, sin, scale, size, out)
    else:
        rotate(x, cos, sin, scale, size, out)


@njit(**OPTIONS)
def rotate(x: Memory, cos: Memory, sin: Memory, scale: float, size: int, out: Memory) -> None:
    """Turn each pair (x[i], x[i + size / 2]) by its angle. x, out [size]; cos, sin [at least size / 2]. out is not x"""
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


@njit(**OPTIONS)
def copy(x: Memory, size: int, scale: float, out: Memory) -> None:
    """out = scale * x, [size] each, of any two types"""
    i = 0
    while i + WIDTH <= size:
        store(out, i, multiply(load(x, i), splat(scale)))
        i += WIDTH
    while i < size:
        write(out, i, read(x, i) * np.float32(scale))
        i += 1
