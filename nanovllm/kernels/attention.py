"""Paged attention: keys and values are read where they lie, once for all heads and queries that share them.

A job is one KV head of one sequence, for the query heads that share it, of one query (decode) or several (a chunk of a
prompt), and some of the keys. Rows of q are queries x heads: row r is of query r // group. A part of the keys stays in
the core's cache while it is used twice: scores first, then the values with their weights.
"""

from typing import NamedTuple

import numpy as np
from numba import njit

from .dot import products
from .exp import exp
from .vectors import OPTIONS, WIDTH, add, at, fma, get, largest_of, load, maximum, put, read, splat, store, write, zeros

PART = 256  # keys; their scores, and what is read of the pool meanwhile, fit in the nearest caches
NEVER = np.float32(-1e30)  # a score below all others


class Pool(NamedTuple):
    """The shape of KVCache.blocks: [num_blocks, num_layers, 2, block_size, num_kv_heads, head_dim]"""

    num_layers: int
    block_size: int
    num_kv_heads: int
    head_dim: int


@njit(**OPTIONS)
def slot(shape, layer, kv, block, offset):
    """Where in the pool a key is. Its value stands block_size * num_kv_heads * head_dim elements behind it."""
    row = ((block * shape.num_layers + layer) * 2 * shape.block_size + offset) * shape.num_kv_heads + kv
    return row * shape.head_dim


@njit(**OPTIONS)
def attend(q, rows, group, first, pool, shape, layer, kv, table, start, end, scores, places, out, peaks, sums):
    """Attention to the keys start .. end - 1, not yet divided by its sum.

    q, out float32 [rows, head_dim], q scaled; the first query stands at position `first`. A query sees keys up to itself
    pool, of that shape; table int64 [max_blocks]; peaks, sums float32 [rows]
    scores float32 [rows, PART], places int64 [PART]: room to work in
    """
    size = shape.head_dim
    for i in range(rows * size):
        write(out, i, np.float32(0))
    for r in range(rows):
        write(peaks, r, NEVER)
        write(sums, r, np.float32(0))
    for part in range(start, end, PART):
        count = min(PART, end - part)
        find_places(shape, layer, kv, table, part, count, places)
        for t in range(count):
            products(at(pool, get(places, t)), q, size, rows, at(scores, t), PART)
        for r in range(rows):
            seen = min(count, first + r // group + 1 - part)
            weigh(at(scores, r * PART), count, seen, at(out, r * size), size, at(peaks, r), at(sums, r))
        add_values(at(pool, shape.block_size * shape.num_kv_heads * size), places, count, scores, rows, out, size)


@njit(**OPTIONS)
def find_places(shape, layer, kv, table, start, count, places):
    """places[t] = where in the pool the key of position start + t is"""
    block, offset = start // shape.block_size, start % shape.block_size
    for t in range(count):
        put(places, t, slot(shape, layer, kv, get(table, block), offset))
        offset += 1
        if offset == shape.block_size:
            block, offset = block + 1, 0


@njit(**OPTIONS)
def weigh(scores, count, seen, out, size, peaks, sums):
    """Scores become weights, exp(score - peak), 0 for keys not seen. What was summed before follows to the new peak."""
    before = read(peaks, 0)
    peak = largest(scores, seen, before)
    total = np.float32(0)
    for t in range(seen):
        weight = exp(read(scores, t) - peak)
        write(scores, t, weight)
        total += weight
    for t in range(max(seen, 0), count):
        write(scores, t, np.float32(0))
    scale = exp(before - peak)
    for d in range(size):
        write(out, d, read(out, d) * scale)
    write(peaks, 0, peak)
    write(sums, 0, read(sums, 0) * scale + total)


@njit(**OPTIONS)
def largest(numbers, count, least):
    """The largest of numbers[: count], and of `least`."""
    peaks, t = splat(least), 0
    while t + WIDTH <= count:
        peaks = maximum(peaks, load(numbers, t))
        t += WIDTH
    peak = largest_of(peaks)
    while t < count:
        peak = max(peak, read(numbers, t))
        t += 1
    return peak


@njit(**OPTIONS)
def add_values(values, places, count, weights, rows, out, size):
    """out[r] += sum over t of weights[r, t] * the value at places[t]. values: the pool, moved from keys to values"""
    for d in range(0, size - WIDTH + 1, WIDTH):
        r = 0
        while r + 4 <= rows:
            add_to_4(at(values, d), places, count, at(weights, r * PART), at(out, r * size + d), size)
            r += 4
        if r + 2 <= rows:
            add_to_2(at(values, d), places, count, at(weights, r * PART), at(out, r * size + d), size)
            r += 2
        if r < rows:
            add_to_1(at(values, d), places, count, at(weights, r * PART), at(out, r * size + d))
    for d in range(size - size % WIDTH, size):
        for r in range(rows):
            total = np.float32(0)
            for t in range(count):
                total += read(weights, r * PART + t) * read(values, get(places, t) + d)
            write(out, r * size + d, read(out, r * size + d) + total)


@njit(**OPTIONS)
def add_to_4(values, places, count, weights, out, size):
    """Sixteen numbers of four rows, in registers while all keys go by."""
    a, b, c, d = load(out, 0), load(out, size), load(out, 2 * size), load(out, 3 * size)
    for t in range(count):
        value = load(values, get(places, t))
        a = fma(value, splat(read(weights, t)), a)
        b = fma(value, splat(read(weights, PART + t)), b)
        c = fma(value, splat(read(weights, 2 * PART + t)), c)
        d = fma(value, splat(read(weights, 3 * PART + t)), d)
    store(out, 0, a)
    store(out, size, b)
    store(out, 2 * size, c)
    store(out, 3 * size, d)


@njit(**OPTIONS)
def add_to_2(values, places, count, weights, out, size):
    a, b = load(out, 0), load(out, size)
    for t in range(count):
        value = load(values, get(places, t))
        a = fma(value, splat(read(weights, t)), a)
        b = fma(value, splat(read(weights, PART + t)), b)
    store(out, 0, a)
    store(out, size, b)


@njit(**OPTIONS)
def add_to_1(values, places, count, weights, out):
    """Two sums: an addition waits for the one before."""
    even, odd, t = load(out, 0), zeros(), 0
    while t + 2 <= count:
        even = fma(load(values, get(places, t)), splat(read(weights, t)), even)
        odd = fma(load(values, get(places, t + 1)), splat(read(weights, t + 1)), odd)
        t += 2
    if t < count:
        even = fma(load(values, get(places, t)), splat(read(weights, t)), even)
    store(out, 0, add(even, odd))


@njit(**OPTIONS)
def merge(out, peaks, sums, parts, rows, size, merged):
    """Attention from its parts. out [parts, rows, size]; peaks, sums [parts, rows]; merged [rows, size]"""
    for r in range(rows):
        peak = NEVER
        for part in range(parts):
            peak = max(peak, read(peaks, part * rows + r))
        total = np.float32(0)
        for d in range(size):
            write(merged, r * size + d, np.float32(0))
        for part in range(parts):
            share = exp(read(peaks, part * rows + r) - peak)
            total += share * read(sums, part * rows + r)
            for d in range(size):
                more = share * read(out, (part * rows + r) * size + d)
                write(merged, r * size + d, read(merged, r * size + d) + more)
        for d in range(size):
            write(merged, r * size + d, read(merged, r * size + d) / total)
