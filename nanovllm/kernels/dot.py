"""One stored row times several rows of x: the inner loop of a linear layer, and of queries that meet a key.

The stored row comes from memory and is the expensive part. It is read once for up to four rows of x.
"""

from numba import njit

from .vectors import OPTIONS, WIDTH, Memory, add, at, fma, load, read, sum_of, write, zeros


@njit(**OPTIONS)
def products(row: Memory, x: Memory, size: int, rows: int, out: Memory, stride: int) -> None:
    """out[m * stride] = row * x[m] for m in range(rows). row [size]; x float32 [rows, size]; out float32"""
    m = 0
    while m + 4 <= rows:
        a, b, c, d = dot4(row, at(x, m * size), size)
        write(out, m * stride, a)
        write(out, (m + 1) * stride, b)
        write(out, (m + 2) * stride, c)
        write(out, (m + 3) * stride, d)
        m += 4
    if m + 2 <= rows:
        a, b = dot2(row, at(x, m * size), size)
        write(out, m * stride, a)
        write(out, (m + 1) * stride, b)
        m += 2
    if m < rows:
        write(out, m * stride, dot(row, at(x, m * size), size))


@njit(**OPTIONS)
def dot(row: Memory, x: Memory, size: int) -> float:
    """row * x, both [size]. Two sums: an addition waits for the one before."""
    even, odd, i = zeros(), zeros(), 0
    while i + 2 * WIDTH <= size:
        even = fma(load(row, i), load(x, i), even)
        odd = fma(load(row, i + WIDTH), load(x, i + WIDTH), odd)
        i += 2 * WIDTH
    if i + WIDTH <= size:
        even = fma(load(row, i), load(x, i), even)
        i += WIDTH
    total = sum_of(add(even, odd))
    while i < size:
        total += read(row, i) * read(x, i)
        i += 1
    return total


@njit(**OPTIONS)
def dot2(row: Memory, x: Memory, size: int) -> tuple[float, float]:
    """x [2, size]"""
    a, b, i = zeros(), zeros(), 0
    while i + WIDTH <= size:
        numbers = load(row, i)
        a = fma(numbers, load(x, i), a)
        b = fma(numbers, load(x, size + i), b)
        i += WIDTH
    sum_a, sum_b = sum_of(a), sum_of(b)
    while i < size:
        sum_a += read(row, i) * read(x, i)
        sum_b += read(row, i) * read(x, size + i)
        i += 1
    return sum_a, sum_b


@njit(**OPTIONS)
def dot4(row: Memory, x: Memory, size: int) -> tuple[float, float, float, float]:
    """x [4, size]"""
    a, b, c, d, i = zeros(), zeros(), zeros(), zeros(), 0
    while i + WIDTH <= size:
        numbers = load(row, i)
        a = fma(numbers, load(x, i), a)
        b = fma(numbers, load(x, size + i), b)
        c = fma(numbers, load(x, 2 * size + i), c)
        d = fma(numbers, load(x, 3 * size + i), d)
        i += WIDTH
    sum_a, sum_b, sum_c, sum_d = sum_of(a), sum_of(b), sum_of(c), sum_of(d)
    while i < size:
        sum_a += read(row, i) * read(x, i)
        sum_b += read(row, i) * read(x, size + i)
        sum_c += read(row, i) * read(x, 2 * size + i)
        sum_d += read(row, i) * read(x, 3 * size + i)
        i += 1
    return sum_a, sum_b, sum_c, sum_d
