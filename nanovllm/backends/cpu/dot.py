"""Stored rows times rows of x: the inner loop of a linear layer of few rows, and of queries that meet keys.

Some rows of the one meet some of the other, each with each, in registers. A stored row comes from memory and is the
expensive part: it is read once for up to four rows of x.
"""

from typing import Any

from numba import njit

from .blocks import no_sums, products_at, starts_of, sums_of
from .lanes import write_rows
from .pairs import add_products, step_of
from .vectors import OPTIONS, Memory, add


@njit(**OPTIONS)
def meet(a: Memory, rows_a: tuple[int, ...], b: Memory, rows_b: tuple[int, ...], size: int) -> Any:
    """Return a vector: row k of a times row r of b is in lane k * len(rows_b) + r.

    rows_a, rows_b: where they start, at most 16 pairs; `size` numbers each
    """
    sums, more, each, i = no_sums(rows_a, rows_b), no_sums(rows_a, rows_b), step_of(a, b), 0
    if len(sums) <= 4:  # two sums of each: an addition waits for the one before
        while i + 2 * each <= size:
            sums = add_products(sums, a, rows_a, b, rows_b, i)
            more = add_products(more, a, rows_a, b, rows_b, i + each)
            i += 2 * each
    while i + each <= size:
        sums = add_products(sums, a, rows_a, b, rows_b, i)
        i += each
    products = add(sums_of(sums), sums_of(more)) if len(sums) <= 4 else sums_of(sums)
    while i < size:
        products = add(products, products_at(a, rows_a, b, rows_b, i))
        i += 1
    return products


@njit(**OPTIONS)
def products(row: Memory, x: Memory, size: int, rows: int, out: Memory, stride: int) -> None:
    """out[m * stride] = row * x[m] for m in range(rows), at most 4. row [size]; x [rows, size]; out float32"""
    if rows == 1:
        write_products(row, x, (0,), size, out, stride)
    elif rows == 2:
        write_products(row, x, (0, 1), size, out, stride)
    else:  # three are four, with the last one twice
        write_products(row, x, (0, 1, 2, rows - 1), size, out, stride)


@njit(**OPTIONS)
def write_products(row: Memory, x: Memory, rows: tuple[int, ...], size: int, out: Memory, stride: int) -> None:
    write_rows(out, starts_of(rows, stride), meet(row, (0,), x, starts_of(rows, size), size))
