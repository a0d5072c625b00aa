"""The work on each row between the matmuls of a layer: RMSNorm, rotary embedding, SiLU.

Rows may have any size: sixteen numbers at a time are vectors, and the rest are handled one by one. The functions that
Python calls use several threads if there are enough numbers.
"""

import numpy as np
from numba import prange

from .vectors import (
    WIDTH,
    Memory,
    add,
    at,
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
    parallel_entry,
    read,
    splat,
    store,
    stored,
    sum_of,
    write,
    zeros,
)

ENOUGH = 1 << 15  # numbers: a smaller call is done before a second thread has woken up
LOWEST_GATE = np.float32(-88.0)  # exp(88) is the last power that float32 holds; silu of anything lower is 0

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
    for i in range(size):
        write(out, i, read(x, i) * scale * read(weight, i))


@parallel_entry
def add_and_norm(
    x: int, y: int, weight: int, eps: float, rows: int, size: int, workers: int, like: np.ndarray, out: int
) -> None:
    """Add y to x, then set out to x / rms(x) * weight, row by row.

    x is the address of float32 [rows, size], y and out of [rows, size] in the type of `like`, weight of float32 [size].
    If y is 0, nothing is added.
    """
    if workers == 1 or rows * size < ENOUGH:
        add_and_norm_rows(x, y, weight, eps, 0, rows, size, like, out)
    else:
        each = -(-rows // (4 * workers))
        for task in prange(-(-rows // each)):
            add_and_norm_rows(x, y, weight, eps, task * each, min(task * each + each, rows), size, like, out)


@kernel
def add_and_norm_rows(
    x: int, y: int, weight: int, eps: float, start: int, end: int, size: int, like: np.ndarray, out: int
) -> None:
    for row in range(start, end):
        add_and_norm_row(
            at(floats(x), row * size), y, floats(weight), eps, row * size, size, like, at(stored(out, like), row * size)
        )


@kernel
def add_and_norm_row(
    x: Memory, y: int, weight: Memory, eps: float, offset: int, size: int, like: np.ndarray, out: Memory
) -> None:
    squares, total, i, more = zeros(), np.float32(0), 0, at(stored(y, like), offset)
    while i + WIDTH <= size:
        numbers = load(x, i)
        if y:
            numbers = add(numbers, load(more, i))
            store(x, i, numbers)
        squares = fma(numbers, numbers, squares)
        i += WIDTH
    while i < size:
        if y:
            write(x, i, read(x, i) + read(more, i))
        total += read(x, i) * read(x, i)
        i += 1
    scale = np.float32(1) / np.sqrt((total + sum_of(squares)) / np.float32(size) + np.float32(eps))
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
    x: Memory, norm: int, rotates: int, cos: Memory, sin: Memory, eps: float, scale: float, size: int, scratch: Memory,
    out: Memory,
) -> None:  # fmt: skip
    """Normalize, rotate and scale a head. x, out [size]; scratch float32 [size].

    `norm` is the address of float32 [size], or 0 if the model has no head norms.
    `rotates` is 0 if x is rotated already.
    """
    if norm:
        rms_norm(x, floats(norm), eps, size, scratch)
        rotate_or_copy(scratch, rotates, cos, sin, scale, size, out)
    else:
        rotate_or_copy(x, rotates, cos, sin, scale, size, out)


@kernel
def rotate_or_copy(x: Memory, rotates: int, cos: Memory, sin: Memory, scale: float, size: int, out: Memory) -> None:
    if rotates:
        rotate(x, cos, sin, scale, size, out)
    else:
        copy(x, size, scale, out)


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
    """Set out to scale * x, [size] each, of any two types."""
    i = 0
    while i + WIDTH <= size:
        store(out, i, multiply(load(x, i), splat(scale)))
        i += WIDTH
    while i < size:
        write(out, i, read(x, i) * np.float32(scale))
        i += 1


# SiLU


@kernel
def silu_and_mul_row(gate: Memory, up: Memory, size: int, out: Memory) -> None:
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


@parallel_entry
def silu_and_mul(gate_up: int, rows: int, size: int, workers: int, like: np.ndarray, act: int) -> None:
    """Set act to silu(gate) * up, row by row.

    gate_up is the address of [rows, 2, size] in the type of `like`, act of [rows, size].
    """
    if workers == 1 or rows * size < ENOUGH:
        silu_and_mul_rows(stored(gate_up, like), 0, rows, size, stored(act, like))
    else:
        each = -(-rows // (4 * workers))
        for task in prange(-(-rows // each)):
            silu_and_mul_rows(
                stored(gate_up, like), task * each, min(task * each + each, rows), size, stored(act, like)
            )


@kernel
def silu_and_mul_rows(gate_up: Memory, start: int, end: int, size: int, act: Memory) -> None:
    for row in range(start, end):
        gate = at(gate_up, row * 2 * size)
        silu_and_mul_row(gate, at(gate, size), size, at(act, row * size))
