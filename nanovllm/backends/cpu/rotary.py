"""A head's norm, its rotation by its position's angles, and its scale."""

import numpy as np
from numba import njit

from .lanes import negative
from .norm import normalize
from .vectors import OPTIONS, WIDTH, Memory, floats, fma, load, multiply, read, splat, store, write


@njit(**OPTIONS)
def turn(
    x: Memory, norm: int, turns: int, cos: Memory, sin: Memory, eps: float, scale: float, size: int, own: Memory,
    out: Memory,
) -> None:  # fmt: skip
    """Norm, rotate and scale a head. x, out [size]; own float32 [size]: room to work in

    norm: address of float32 [size]; 0: the model has none. turns: 0 if x is rotated already
    """
    if norm:
        normalize(x, floats(norm), eps, size, own)
        turn_normed(own, turns, cos, sin, scale, size, out)
    else:
        turn_normed(x, turns, cos, sin, scale, size, out)


@njit(**OPTIONS)
def turn_normed(x: Memory, turns: int, cos: Memory, sin: Memory, scale: float, size: int, out: Memory) -> None:
    if turns:
        rotate(x, cos, sin, scale, size, out)
    else:
        copy(x, size, scale, out)


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
