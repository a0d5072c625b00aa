"""Paged attention: keys and values are read in place, once for all heads and queries that share them.

attend() handles one KV head of one sequence, for one query (a decode) or several (a chunk of a prompt). The rows of q
are queries x query heads of the KV head: row r belongs to query r // group, where `group` query heads share the KV
head. Keys are processed in tiles, which stay in the core's cache for two passes: the first computes the scores, and the
second adds the weighted values.

    scores of four rows, one vector:   row 0: key 0 1 2 3 | row 1: key 0 1 2 3 | row 2: ... | row 3: ...

Four rows times four keys are sixteen dot products in registers, and their sums are the lanes of one vector. Two rows
are multiplied by eight keys, and one row by sixteen. Then the scores are stored row by row, for the softmax.

A long context is split, so that several workers attend to it at the same time. merge() combines the results.

A row's result has the same bits whatever runs beside it, because its sums have one order: sixteen sums of the weights,
key by key; keys that a row must not see weigh exactly 0; and the results of SPLIT keys each are joined in order, even
where one worker attends to all of them.
"""

from typing import Any

import numpy as np

from .blocks import (
    lanes_of_rows,
    largest_of_rows,
    limits,
    load_block,
    numbered,
    per_line,
    places_of,
    prefetch,
    scaled,
    spread,
    starts_of,
    store_lanes,
    store_rows,
    sums_of,
    write_rows,
)
from .dot import add_weighted, depth_of, dots
from .elementwise import copy
from .layout import AHEAD, PLACES, TILE, WIDTH, Pool
from .vectors import (
    Memory,
    add,
    as_type,
    at,
    exp,
    exp_of,
    first_of,
    fma,
    get,
    kernel,
    load,
    maximum,
    multiply,
    negative,
    put,
    read,
    splat,
    store,
    where_below,
    write,
    zeros,
)

MASKED = np.float32(-1e30)  # a score below all others


@kernel
def slot(shape: Pool, layer: int, kv: int, block: int, offset: int) -> int:
    """Return the pool index at which a key starts. Its value is block_size * num_kv_heads * head_dim numbers later."""
    row = ((block * shape.num_layers + layer) * 2 * shape.block_size + offset) * shape.num_kv_heads + kv
    return row * shape.head_dim


@kernel
def attend(
    q: Memory, rows: int, group: int, first: int, pool: Memory, shape: Pool, layer: int, kv: int, table: Memory,
    start: int, end: int, scores: Memory, places: Memory, out: Memory, peaks: Memory, sums: Memory,
) -> None:  # fmt: skip
    """Attend to the keys from start to end - 1, without dividing by the sum of the weights.

    q [rows, head_dim], scaled, in float32 or the type of layout.type_of(); out float32 [rows, head_dim]. The first
    query has position `first`. A query sees the keys up to its own position, which must be at least `start`.
    pool [as in `shape`]; table int64 [max_blocks]; peaks, sums float32 [rows]
    scores float32 [SCORES] and places int64 [PLACES] are scratch space.
    """
    size = shape.head_dim
    for i in range(rows * size):
        write(out, i, np.float32(0))
    for r in range(rows):
        write(peaks, r, MASKED)
        write(sums, r, np.float32(0))
    values = at(pool, shape.block_size * shape.num_kv_heads * size)
    for tile in range(start, end, TILE):
        count, before = min(TILE, end - tile), first + 1 - tile
        find_places(shape, layer, kv, table, tile, min(TILE + AHEAD, end - tile), places)
        if tile == start:
            prefetch_all(pool, places, 0, AHEAD, size)
        r = 0
        while rows - r >= 3:  # three rows are computed as four, with the last one twice
            four = (r, r + 1, r + 2, min(r + 3, rows - 1))
            attend_rows(q, four, group, before, pool, values, places, count, scores, out, size, peaks, sums)
            r += 4
        if rows - r == 2:
            attend_rows(q, (r, r + 1), group, before, pool, values, places, count, scores, out, size, peaks, sums)
        if rows - r == 1:
            attend_rows(q, (r,), group, before, pool, values, places, count, scores, out, size, peaks, sums)


@kernel
def find_places(shape: Pool, layer: int, kv: int, table: Memory, start: int, count: int, places: Memory) -> None:
    """Set places[t] to the slot() of the key at position start + t, for t < count, and the rest to the last slot()."""
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


@kernel
def prefetch_all(memory: Memory, places: Memory, start: int, end: int, size: int) -> None:
    """Prefetch the rows of `size` numbers at places[start : end]."""
    for t in range(start, end):
        for d in range(0, size, per_line(memory)):
            prefetch(memory, get(places, t) + d)


@kernel
def attend_rows(
    q: Memory, rows: tuple[int, ...], group: int, before: int, keys: Memory, values: Memory, places: Memory, count: int,
    scores: Memory, out: Memory, size: int, peaks: Memory, sums: Memory,
) -> None:  # fmt: skip
    """Attend to a tile of keys with one, two or four rows of q, and rescale earlier sums to the new peak.

    `rows` is a tuple of row numbers. The query of rows[i] sees the first before + rows[i] // group keys of the tile.
    """
    count = max(0, min(count, before + rows[-1] // group))
    starts, by_row, each = starts_of(rows, size), starts_of(numbered(rows), TILE), WIDTH // len(rows)
    limit, masked = limits(rows, group, before, count), splat(MASKED)
    highest, last = masked, -(-count // each) * each
    for t in range(0, count, each):
        if rows[0] == 0:  # the first rows load the tile, and later rows find it in the cache
            prefetch_all(keys, places, t + AHEAD, t + AHEAD + each, size)
            prefetch_all(values, places, t, t + each, size)
        score = where_below(splat(t), limit, dots(keys, places_of(places, t, rows), q, starts, size), masked)
        store_lanes(scores, by_row, t, score)
        highest = maximum(highest, score)
    for t in range(last, -(-count // WIDTH) * WIDTH, each):
        store_lanes(scores, by_row, t, masked)
    old = spread(peaks, rows)
    peak = maximum(old, largest_of_rows(highest, rows))
    scale, minus, weights = exp_of(add(old, negative(peak))), lanes_of_rows(negative(peak), rows), as_type(scores, q)
    for r in range(len(rows)):
        total = zeros()
        for t in range(r * TILE, r * TILE + count, WIDTH):
            weight = exp_of(add(load(scores, t), minus[r]))
            store(weights, t, weight)  # overwrites only scores that were already read
            total = add(total, weight)
        store(scores, 4 * TILE + r * WIDTH, total)
    totals = sums_of(load_block(scores, starts_of(numbered(rows), WIDTH), (4 * TILE,)))
    write_rows(peaks, rows, peak)
    write_rows(sums, rows, fma(spread(sums, rows), scale, totals))
    add_values(values, places, count, weights, by_row, out, starts, lanes_of_rows(scale, rows), size)


@kernel
def add_values(
    values: Memory, places: Memory, count: int, weights: Memory, by_row: tuple[int, ...], out: Memory,
    starts: tuple[int, ...], scale: tuple[Any, ...], size: int,
) -> None:  # fmt: skip
    """Set out[r] to scale[r] * out[r] plus, for each key t, weights[by_row[r] + t] times the value at places[t]."""
    d = 0
    while d + 4 * WIDTH <= size:
        four = d, d + WIDTH, d + 2 * WIDTH, d + 3 * WIDTH
        add_columns(values, places, count, weights, by_row, out, starts, four, scale)
        d += 4 * WIDTH
    while d + WIDTH <= size:
        add_columns(values, places, count, weights, by_row, out, starts, (d,), scale)
        d += WIDTH
    for i in range(d, size):
        for r in range(len(starts)):
            if r == 0 or starts[r] != starts[r - 1]:  # the last row may appear twice
                total = read(out, starts[r] + i) * first_of(scale[r])
                for t in range(count):
                    total += read(weights, by_row[r] + t) * read(values, get(places, t) + i)
                write(out, starts[r] + i, total)


@kernel
def add_columns(
    values: Memory, places: Memory, count: int, weights: Memory, by_row: tuple[int, ...], out: Memory,
    starts: tuple[int, ...], columns: tuple[int, ...], scale: tuple[Any, ...],
) -> None:  # fmt: skip
    """Do the same as add_values() for the 16 numbers at each of `columns`, keeping the sums in registers."""
    sums, depth = scaled(load_block(out, starts, columns), scale), depth_of(weights, values)
    for t in range(0, count, depth):
        last = get(places, t + depth - 1)
        sums = add_weighted(sums, weights, by_row, t, values, columns, get(places, t), last)
    store_rows(out, starts, columns, sums)


@kernel
def join(
    out: Memory, peaks: Memory, sums: Memory, more: Memory, more_peaks: Memory, more_sums: Memory, rows: int, size: int
) -> None:
    """Join attention to some keys, in place, with attention to the SPLIT keys that follow.

    out, more [rows, size]; peaks, sums, more_peaks, more_sums [rows]
    """
    for r in range(rows):
        old, new = read(peaks, r), read(more_peaks, r)
        peak = max(old, new)
        kept, added = exp(old - peak), exp(new - peak)
        d = r * size
        while d + WIDTH <= (r + 1) * size:
            store(out, d, fma(load(more, d), splat(added), multiply(load(out, d), splat(kept))))
            d += WIDTH
        while d < (r + 1) * size:
            write(out, d, read(more, d) * added + read(out, d) * kept)
            d += 1
        write(peaks, r, peak)
        write(sums, r, read(more_sums, r) * added + read(sums, r) * kept)


@kernel
def merge(out: Memory, peaks: Memory, sums: Memory, splits: int, rows: int, size: int, merged: Memory) -> None:
    """Join the results of attend() for several splits of the keys, in order, and divide by the sums of the weights.

    The first split's numbers change.

    out [splits, rows, size]; peaks, sums [splits, rows]; merged [rows, size] of any type
    """
    for split in range(1, splits):
        i = split * rows
        join(out, peaks, sums, at(out, i * size), at(peaks, i), at(sums, i), rows, size)
    for r in range(rows):
        copy(at(out, r * size), size, np.float32(1) / read(sums, r), at(merged, r * size))
