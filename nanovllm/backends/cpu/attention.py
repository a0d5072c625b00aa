"""Paged attention: keys and values are read where they lie, once for all heads and queries that share them.

A job is one KV head of one sequence, for the query heads that share it, of one query (decode) or several (a chunk of a
prompt), and some of the keys. Rows of q are queries x heads: row r is of query r // group. A part of the keys stays in
the core's cache while it is used twice: scores first, then the values with their weights.

    scores of four rows, one vector:   key 0: row 0 1 2 3 | key 1: row 0 1 2 3 | key 2: ... | key 3: ...

Four rows meet four keys, sixteen products of vectors in registers; their sums are the lanes of one vector. So the
softmax takes sixteen scores at a time, too. Two rows meet eight keys, one row meets sixteen.
"""

from typing import Any, NamedTuple

import numpy as np
from numba import njit

from .blocks import (
    load_block,
    load_rows,
    outer,
    per_line,
    places_of,
    prefetch,
    scaled,
    splats,
    starts_of,
    store_rows,
)
from .dot import meet
from .exp import exp
from .lanes import exp_of, lanes_of_rows, largest_of_rows, limits, spread, sums_of_rows, where_below, write_rows
from .vectors import (
    OPTIONS,
    WIDTH,
    Memory,
    add,
    at,
    fma,
    get,
    largest_of,
    load,
    maximum,
    multiply,
    put,
    read,
    splat,
    store,
    write,
    zeros,
)

PART = 128  # keys; their scores, and what is read of the pool meanwhile, fit in the nearest caches
AHEAD = 32  # keys that are asked for before they are needed: blocks lie anywhere, no processor guesses where
PLACES = PART + AHEAD + WIDTH
NEVER = np.float32(-1e30)  # a score below all others


class Pool(NamedTuple):
    """The shape of KVCache.blocks: [num_blocks, num_layers, 2, block_size, num_kv_heads, head_dim]"""

    num_layers: int
    block_size: int
    num_kv_heads: int
    head_dim: int


@njit(**OPTIONS)
def slot(shape: Pool, layer: int, kv: int, block: int, offset: int) -> int:
    """Return where in the pool a key is. Its value is block_size * num_kv_heads * head_dim elements behind it."""
    row = ((block * shape.num_layers + layer) * 2 * shape.block_size + offset) * shape.num_kv_heads + kv
    return row * shape.head_dim


@njit(**OPTIONS)
def attend(
    q: Memory, rows: int, group: int, first: int, pool: Memory, shape: Pool, layer: int, kv: int, table: Memory,
    start: int, end: int, scores: Memory, places: Memory, out: Memory, peaks: Memory, sums: Memory,
) -> None:  # fmt: skip
    """Attention to the keys start .. end - 1, not yet divided by its sum.

    q, out float32 [rows, head_dim], q scaled; the first query stands at position `first`. A query sees keys up to
    itself, and the key `start` at least.
    pool, of that shape; table int64 [max_blocks]; peaks, sums float32 [rows]
    scores float32 [4 * PART], places int64 [PLACES]: room to work in
    """
    size = shape.head_dim
    for i in range(rows * size):
        write(out, i, np.float32(0))
    for r in range(rows):
        write(peaks, r, NEVER)
        write(sums, r, np.float32(0))
    values = at(pool, shape.block_size * shape.num_kv_heads * size)
    for part in range(start, end, PART):
        count, before = min(PART, end - part), first + 1 - part
        find_places(shape, layer, kv, table, part, min(PART + AHEAD, end - part), places)
        if part == start:
            ask(pool, places, 0, AHEAD, size)
        r = 0
        while rows - r >= 3:  # three are four with the last one twice
            four = (r, r + 1, r + 2, min(r + 3, rows - 1))
            attend_rows(q, four, group, before, pool, values, places, count, scores, out, size, peaks, sums)
            r += 4
        if rows - r == 2:
            attend_rows(q, (r, r + 1), group, before, pool, values, places, count, scores, out, size, peaks, sums)
        if rows - r == 1:
            attend_rows(q, (r,), group, before, pool, values, places, count, scores, out, size, peaks, sums)


@njit(**OPTIONS)
def find_places(shape: Pool, layer: int, kv: int, table: Memory, start: int, count: int, places: Memory) -> None:
    """places[t] = where in the pool the key of position start + t is. Behind them, the last one again."""
    block, offset, place = start // shape.block_size, start % shape.block_size, 0
    step = shape.num_kv_heads * shape.head_dim
    for t in range(count):
        if t == 0 or offset == shape.block_size:
            if t:
                block, offset = block + 1, 0
            place = slot(shape, layer, kv, get(table, block), offset)
        put(places, t, place)
        place += step
        offset += 1
    for t in range(count, PLACES):
        put(places, t, place - step)


@njit(**OPTIONS)
def ask(memory: Memory, places: Memory, start: int, end: int, size: int) -> None:
    """Ask for what stands at places[start : end], `size` numbers each."""
    for t in range(start, end):
        for d in range(0, size, per_line(memory)):
            prefetch(memory, get(places, t) + d)


@njit(**OPTIONS)
def attend_rows(
    q: Memory, rows: tuple[int, ...], group: int, before: int, keys: Memory, values: Memory, places: Memory, count: int,
    scores: Memory, out: Memory, size: int, peaks: Memory, sums: Memory,
) -> None:  # fmt: skip
    """One, two or four rows and a part of the keys. What was summed before follows to the new peak.

    rows: their numbers, a tuple. The query of row r sees the first before + r // group keys.
    """
    count = min(count, before + rows[-1] // group)
    starts, each = starts_of(rows, size), WIDTH // len(rows)
    limit, never = limits(rows, group, before, count), splat(NEVER)
    old = spread(peaks, rows)
    peak = old
    for t in range(0, count, each):
        if rows[0] == 0:  # the first rows of a part read it, the others find it in the cache
            ask(keys, places, t + AHEAD, t + AHEAD + each, size)
            ask(values, places, t, t + each, size)
        score = where_below(splat(t), limit, meet(keys, places_of(places, t, rows), q, starts, size), never)
        store(scores, t * len(rows), score)
        peak = maximum(peak, score)
    peak = largest_of_rows(peak, rows)
    minus, total = multiply(peak, splat(-1)), zeros()
    for t in range(0, count, each):
        weight = exp_of(add(load(scores, t * len(rows)), minus))
        store(scores, t * len(rows), weight)
        total = add(total, weight)
    scale = exp_of(add(old, minus))
    write_rows(peaks, rows, peak)
    write_rows(sums, rows, fma(spread(sums, rows), scale, sums_of_rows(total, rows)))
    add_values(values, places, count, scores, out, starts, lanes_of_rows(scale, rows), size)


@njit(**OPTIONS)
def add_values(
    values: Memory, places: Memory, count: int, weights: Memory, out: Memory, starts: tuple[int, ...],
    scale: tuple[Any, ...], size: int,
) -> None:  # fmt: skip
    """out[r] = scale[r] * out[r] + sum over t of weights[t, r] * the value at places[t]"""
    d = 0
    while d + 4 * WIDTH <= size:
        add_columns(values, places, count, weights, out, starts, (d, d + WIDTH, d + 2 * WIDTH, d + 3 * WIDTH), scale)
        d += 4 * WIDTH
    while d + WIDTH <= size:
        add_columns(values, places, count, weights, out, starts, (d,), scale)
        d += WIDTH
    for i in range(d, size):
        for r in range(len(starts)):
            if r == 0 or starts[r] != starts[r - 1]:  # the last row may stand there twice
                total = read(out, starts[r] + i) * largest_of(scale[r])
                for t in range(count):
                    total += read(weights, t * len(starts) + r) * read(values, get(places, t) + i)
                write(out, starts[r] + i, total)


@njit(**OPTIONS)
def add_columns(
    values: Memory, places: Memory, count: int, weights: Memory, out: Memory, starts: tuple[int, ...],
    columns: tuple[int, ...], scale: tuple[Any, ...],
) -> None:  # fmt: skip
    """Add to some columns of all rows, which stay in registers while all keys go by."""
    sums = scaled(load_block(out, starts, columns), scale)
    for t in range(count):
        sums = outer(sums, splats(weights, t * len(starts), starts), load_rows(values, columns, get(places, t)))
    store_rows(out, starts, columns, sums)


@njit(**OPTIONS)
def merge(out: Memory, peaks: Memory, sums: Memory, parts: int, rows: int, size: int, merged: Memory) -> None:
    """Attention from its parts. out [parts, rows, size]; peaks, sums [parts, rows]; merged [rows, size], of any type"""
    for r in range(rows):
        peak, total = NEVER, np.float32(0)
        for part in range(parts):
            peak = max(peak, read(peaks, part * rows + r))
        for part in range(parts):
            total += exp(read(peaks, part * rows + r) - peak) * read(sums, part * rows + r)
        d = 0
        while d + WIDTH <= size:
            whole = zeros()
            for part in range(parts):
                share = splat(exp(read(peaks, part * rows + r) - peak) / total)
                whole = fma(load(out, (part * rows + r) * size + d), share, whole)
            store(merged, r * size + d, whole)
            d += WIDTH
        while d < size:
            number = np.float32(0)
            for part in range(parts):
                number += exp(read(peaks, part * rows + r) - peak) / total * read(out, (part * rows + r) * size + d)
            write(merged, r * size + d, number)
            d += 1
