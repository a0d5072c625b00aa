"""Rotation of a head by its position's angles."""

from numba import njit

from .vectors import OPTIONS, read, write


@njit(**OPTIONS)
def rotate(x, cos, sin, size):
    """Turn each pair (x[i], x[i + size / 2]), in place. x [size]; cos, sin [at least size / 2]"""
    half = size // 2
    for i in range(half):
        a, b = read(x, i), read(x, half + i)
        c, s = read(cos, i), read(sin, i)
        write(x, i, a * c - b * s)
        write(x, half + i, b * c + a * s)
