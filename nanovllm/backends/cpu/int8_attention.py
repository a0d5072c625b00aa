"""Paged attention to keys and values in int8. ../../engine/int8_blocks.py describes their layout.

Four tokens form a quad, which is read in lines of 64 bytes. With AVX-512 VNNI, one instruction multiplies a line by 64
other bytes and adds every four products; other processors need several instructions:

    keys     token a: a0 a1 a2 a3, token b: b0 b1 b2 b3, c, d; then a4 ...    times q0 q1 q2 q3 four times, then q4 ...
    values   number 0: a0 b0 c0 d0, number 1: a1 b1 c1 d1, ...                times the weights of a, b, c, d each time

So a line of keys adds to four scores, and a line of values adds to 16 numbers of the result. Queries and weights become
16-bit integers, whose two bytes are multiplied separately: their rounding is negligible next to that of the stored keys
and values. Scales are applied to scores and to weights.

Each tile is read in order while the next one is prefetched.
"""

from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba import types
from numba.core.cgutils import get_or_insert_function

from ...quantization import LINE
from .attention import MASKED
from .blocks import (
    add_blocks,
    load_block,
    moved,
    no_sums,
    numbered,
    parts_of,
    prefetch,
    scaled,
    shuffled,
    splats,
    starts_of,
    store_rows,
    tuple_of,
)
from .dot import splatted
from .layout import INT8_ROWS, INT8_SCORES, TILE, WIDTH, Int8Pool
from .quantized import BYTE, add_dot, builder_tuple, octets, store_bytes
from .vectors import (
    FLOAT,
    FLOATS,
    WORD,
    WORDS,
    Memory,
    add,
    at,
    constant,
    element,
    exp,
    exp_of,
    floats,
    get,
    intrinsic,
    kernel,
    lane_numbers,
    largest_of,
    largest_or_nan,
    load,
    maximum,
    maximum_or_nan,
    multiply,
    negative,
    pointer_to,
    put,
    read,
    sixteen,
    splat,
    store,
    sum_of,
    vector,
    where_below,
    write,
    zeros,
)

QUAD = 4  # tokens
HIGHEST_Q = np.float32(127 * 256)  # its upper byte is 127
HIGHEST_WEIGHT = np.float32(65535)

words = pointer_to(types.int32)


class Scratch(NamedTuple):
    """Addresses in the float32 scratch space of a worker."""

    scores: int  # [INT8_ROWS, TILE]
    weights: int  # uint8 [INT8_ROWS, 2, TILE], upper and lower bytes
    scales: int  # [2, TILE], of keys and of values
    factors: int  # [2, INT8_ROWS], of earlier results and of new ones
    q_scales: int  # [job_rows]
    q_sums: int  # [job_rows]
    q: int  # int8 [job_rows, 2, QUAD * head_dim], upper and lower bytes


@kernel
def scratch_of(address: int, job_rows: int) -> Scratch:
    weights = address + 4 * INT8_ROWS * TILE
    scales = weights + INT8_ROWS * 2 * TILE
    factors, q_scales = scales + 4 * 2 * TILE, address + 4 * INT8_SCORES
    q_sums = q_scales + 4 * (-(-job_rows // WIDTH) * WIDTH)
    return Scratch(address, weights, scales, factors, q_scales, q_sums, 2 * q_sums - q_scales)


# Storing


@kernel
def head_place(shape: Int8Pool, layer: int, kv: int, block: int) -> int:
    """Return the byte of the pool at which a KV head's part of a block starts."""
    row = (block * shape.num_layers + layer) * shape.num_kv_heads + kv
    return row * shape.block_size * (2 * shape.head_dim + 8)


@kernel
def store_int8(
    shape: Int8Pool, pool: int, layer: int, kv: int, block: int, offset: int, which: int, x: Memory, scratch: int
) -> None:
    """Quantize a token's key (`which` is 0) or value (1), and write it to its slot.

    x float32 [head_dim]; `scratch` is the address of int8 [head_dim].
    """
    size, slots = shape.head_dim, shape.block_size
    head = pool + head_place(shape, layer, kv, block)
    scale = quantize(x, size, octets(scratch))
    write(floats(head + 2 * slots * size), which * slots + offset, scale)
    quad, token = head + (which * slots + offset // QUAD * QUAD) * size, offset % QUAD
    if which:
        for i in range(size):
            move(octets(scratch), i, octets(quad), i * QUAD + token)
    else:
        for i in range(size // 4):
            move(words(scratch), i, words(quad), i * QUAD + token)


@kernel
def quantize(x: Memory, size: int, out: Memory) -> float:
    """Set `out` int8 [size] to x [size] divided by a scale. Return the scale, or NaN if a number is NaN."""
    highest = zeros()
    for i in range(0, size, WIDTH):
        highest = maximum_or_nan(highest, maximum_or_nan(load(x, i), negative(load(x, i))))
    peak = largest_or_nan(highest)
    per_step = splat(np.float32(127) / peak if peak > 0 else np.float32(0))
    for i in range(0, size, WIDTH):
        store_bytes(out, i, multiply(load(x, i), per_step))
    scale: float = peak / np.float32(127)
    return scale


@intrinsic(lambda source, i, target, k: types.void(source, types.intp, target, types.intp))
def move(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    """Set target[k] to source[i]."""
    builder.store(builder.load(builder.gep(args[0], [args[1]])), builder.gep(args[2], [args[3]]))
    return context.get_dummy_value()


# Attending


@kernel
def attend_int8(
    q: Memory, rows: int, group: int, first: int, pool: int, shape: Int8Pool, layer: int, kv: int, table: Memory,
    start: int, end: int, scratch: Scratch, places: Memory, out: Memory, peaks: Memory, sums: Memory,
) -> None:  # fmt: skip
    """Attend like attention.attend(), which describes the arguments. `start` is a multiple of TILE."""
    size = shape.head_dim
    find_places(shape, pool, layer, kv, table, start, end, places)
    for quad in range(0, min(TILE, end - start), QUAD):
        prefetch_lines(octets(pool), get(places, quad // QUAD), size)
        prefetch_lines(octets(pool), get(places, quad // QUAD) + shape.block_size * size, size)
    for i in range(rows * size):
        write(out, i, np.float32(0))
    for r in range(rows):
        write(peaks, r, MASKED)
        write(sums, r, np.float32(0))
        split_query(at(q, r * size), r, size, scratch)
    for tile in range(start, end, TILE):
        count, before = min(TILE, end - tile), first + 1 - tile
        if tile > start:
            find_places(shape, pool, layer, kv, table, tile, end, places)
        copy_scales(shape, pool, layer, kv, table, tile, count, floats(scratch.scales))
        highest, r = highest_scale(scratch, count), 0
        while rows - r >= INT8_ROWS:
            four = (r, r + 1, r + 2, r + 3)
            attend_rows(four, group, before, pool, shape, places, count, highest, scratch, out, peaks, sums)
            r += INT8_ROWS
        if rows - r == 3:
            three = (r, r + 1, r + 2)
            attend_rows(three, group, before, pool, shape, places, count, highest, scratch, out, peaks, sums)
        if rows - r == 2:
            attend_rows((r, r + 1), group, before, pool, shape, places, count, highest, scratch, out, peaks, sums)
        if rows - r == 1:
            attend_rows((r,), group, before, pool, shape, places, count, highest, scratch, out, peaks, sums)


@kernel
def find_places(
    shape: Int8Pool, pool: int, layer: int, kv: int, table: Memory, start: int, end: int, places: Memory
) -> None:
    """Set places[i] to the byte of the pool at which the keys of quad i start, for two tiles, and prefetch the scales.

    Set the rest of `places`, up to the end of the second tile, to the place of the last quad.
    """
    block, offset, place = start // shape.block_size, start % shape.block_size, 0
    count = min(2 * TILE, end - start)
    for t in range(0, count, QUAD):
        if t == 0 or offset == shape.block_size:
            if t:
                block, offset = block + 1, 0
            head = head_place(shape, layer, kv, get(table, block))
            for i in range(0, 8 * shape.block_size, LINE):
                prefetch(octets(pool), head + 2 * shape.block_size * shape.head_dim + i)
            place = head + offset * shape.head_dim
        put(places, t // QUAD, place)
        place += QUAD * shape.head_dim
        offset += QUAD
    for quad in range(-(-count // QUAD), 2 * TILE // QUAD):
        put(places, quad, place - QUAD * shape.head_dim)


@kernel
def copy_scales(
    shape: Int8Pool, pool: int, layer: int, kv: int, table: Memory, start: int, count: int, scales: Memory
) -> None:
    """Copy the scales of a tile to scales [2, TILE], padded with zeros."""
    slots = shape.block_size
    for which in range(2):
        t = 0
        while t < count:
            offset = (start + t) % slots
            head = pool + head_place(shape, layer, kv, get(table, (start + t) // slots))
            source, few = floats(head + slots * 2 * shape.head_dim), min(slots - offset, count - t)
            for i in range(few):
                write(scales, which * TILE + t + i, read(source, which * slots + offset + i))
            t += few
        for i in range(count, TILE):
            write(scales, which * TILE + i, np.float32(0))


@kernel
def split_query(q: Memory, r: int, size: int, scratch: Scratch) -> None:
    """Quantize row r of q to 16 bits, in two bytes. Store every four bytes four times, once per token of a quad."""
    highest, total = zeros(), np.float32(0)
    for i in range(0, size, WIDTH):
        highest = maximum_or_nan(highest, maximum_or_nan(load(q, i), negative(load(q, i))))
    peak = largest_or_nan(highest)
    per_step = splat(HIGHEST_Q / peak if peak > 0 else np.float32(0))
    for i in range(0, size, WIDTH):
        place = r * 2 * QUAD * size + i * QUAD
        total += store_halves(octets(scratch.q), place, QUAD * size, multiply(load(q, i), per_step))
    write(floats(scratch.q_scales), r, peak / HIGHEST_Q)
    write(floats(scratch.q_sums), r, np.float32(128) * total)


@kernel
def prefetch_lines(pool: Memory, place: int, size: int) -> None:
    """Prefetch the lines of a quad."""
    for i in range(0, QUAD * size, LINE):
        prefetch(pool, place + i)


@kernel
def attend_rows(
    rows: tuple[int, ...], group: int, before: int, pool: int, shape: Int8Pool, places: Memory, count: int,
    highest: float, scratch: Scratch, out: Memory, peaks: Memory, sums: Memory,
) -> None:  # fmt: skip
    """Attend to a tile of keys with up to four rows of q, and rescale earlier sums to the new peak.

    The query of rows[i] sees the first before + rows[i] // group keys of the tile. `highest` is highest_scale() of the
    whole tile.
    """
    whole, count, size = count, min(count, before + rows[-1] // group), shape.head_dim
    scores, scales, bytes_of = floats(scratch.scores), floats(scratch.scales), octets(pool)
    uppers = starts_of(rows, 2 * QUAD * size)
    for t in range(0, count, WIDTH):
        first, second, quad = no_sums(uppers, (0, 1, 2, 3)), no_sums(uppers, (0, 1, 2, 3)), t // QUAD
        two = get(places, quad), get(places, quad + 1)
        two_more = get(places, quad + 2), get(places, quad + 3)
        if rows[0] == 0:
            for ahead in range(quad + TILE // QUAD, quad + TILE // QUAD + 4):
                prefetch_lines(bytes_of, get(places, ahead), size)
        for i in range(0, QUAD * size, LINE):
            first = add_keys(first, octets(scratch.q), uppers, QUAD * size, bytes_of, two, i)
        for i in range(0, QUAD * size, LINE):
            second = add_keys(second, octets(scratch.q), uppers, QUAD * size, bytes_of, two_more, i)
        found = scores_of(first, second, floats(scratch.q_sums), floats(scratch.q_scales), rows)
        for j in range(len(rows)):
            seen = splat(np.float32(before + rows[j] // group - t))
            score = where_below(lane_numbers(), seen, multiply(found[j], load(scales, t)), splat(MASKED))
            store(scores, j * TILE + t, score)
    for j in range(len(rows)):
        row_sees = before + rows[j] // group
        row_highest = highest if row_sees >= whole else highest_scale(scratch, row_sees)
        weigh(j, rows[j], row_highest, count, scratch, peaks, sums)
    kept, new = splats(floats(scratch.factors), 0, rows), splats(floats(scratch.factors), INT8_ROWS, rows)
    shift, starts, by_row = shape.block_size * size, starts_of(rows, size), starts_of(numbered(rows), 2 * TILE)
    for i in range(0, size, WIDTH):
        totals = no_sums(rows, (0, 1))
        for quad in range(-(-count // QUAD)):
            place = get(places, quad) + shift + QUAD * i
            totals = add_values(totals, octets(scratch.weights), by_row, TILE, quad * QUAD, bytes_of, place)
            if rows[0] == 0:
                prefetch(bytes_of, get(places, quad + TILE // QUAD) + shift + QUAD * i)
        numbers = scaled(joined(totals, rows), new)
        store_rows(out, starts, (i,), add_blocks(scaled(load_block(out, starts, (i,)), kept), numbers))


@kernel
def highest_scale(scratch: Scratch, seen: int) -> float:
    """Return the highest of the values' scales of a tile's first `seen` keys, or NaN if one is NaN.

    Weights are rounded by it. Keys that a row doesn't see have no say, because other keys may come later.
    """
    highest = zeros()
    for t in range(0, seen, WIDTH):
        scale = load(floats(scratch.scales), TILE + t)
        highest = maximum_or_nan(highest, where_below(lane_numbers(), splat(np.float32(seen - t)), scale, zeros()))
    result: float = largest_or_nan(highest)
    return result


@kernel
def weigh(j: int, row: int, highest: float, count: int, scratch: Scratch, peaks: Memory, sums: Memory) -> None:
    """Turn a row's scores into weights times the values' scales, in two bytes each, and set the row's factors.

    `j` is the row's place in the scratch space, and `row` its number in q. `highest` is highest_scale() of its keys.
    """
    scores, scales = at(floats(scratch.scores), j * TILE), at(floats(scratch.scales), TILE)
    tops, total = splat(MASKED), zeros()
    for t in range(0, count, WIDTH):
        tops = maximum(tops, load(scores, t))
    peak = largest_of(tops)
    per_step = HIGHEST_WEIGHT / highest if highest > 0 else np.float32(0)
    for t in range(0, count, WIDTH):
        weight = exp_of(add(load(scores, t), splat(-peak)))
        total = add(total, weight)
        numbers = multiply(weight, multiply(load(scales, t), splat(per_step)))
        store_weights(octets(scratch.weights), j * 2 * TILE + t, TILE, numbers)
    old = read(peaks, row)
    new = max(old, peak)
    kept, factor = exp(old - new), exp(peak - new)
    write(floats(scratch.factors), j, kept)
    write(floats(scratch.factors), INT8_ROWS + j, factor * (highest / HIGHEST_WEIGHT))
    write(peaks, row, new)
    write(sums, row, read(sums, row) * kept + sum_of(total) * factor)


# Sixteen bits in two bytes


def rounded_words(builder: Any, numbers: Any) -> Any:
    round_to = get_or_insert_function(builder.module, ir.FunctionType(FLOATS, [FLOATS]), "llvm.rint.v16f32")
    return builder.fptosi(builder.call(round_to, [numbers]), WORDS)


@intrinsic(lambda memory, i, distance, numbers: types.float32(memory, types.intp, types.intp, vector))
def store_halves(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    """Round 16 numbers. Store their upper bytes at i, and their lower bytes at i + distance. Both bytes are signed.

    Every four bytes are stored four times. Return the sum of the rounded numbers.
    """
    memory, i, distance, numbers = args
    whole = rounded_words(builder, numbers)
    upper = builder.ashr(builder.add(whole, constant(WORDS, 128)), constant(WORDS, 8))
    lower = builder.sub(whole, builder.shl(upper, constant(WORDS, 8)))
    few = ir.VectorType(WORD, WIDTH // 4)
    for half, place in ((upper, i), (lower, builder.add(i, distance))):
        four = builder.bitcast(builder.trunc(half, sixteen(BYTE)), few)
        line = builder.shuffle_vector(four, four, ir.Constant(WORDS, [lane // QUAD for lane in range(WIDTH)]))
        builder.store(line, element(context, builder, memory, place, WORDS), align=1)
    add_all = get_or_insert_function(builder.module, ir.FunctionType(WORD, [WORDS]), "llvm.vector.reduce.add.v16i32")
    return builder.sitofp(builder.call(add_all, [whole]), FLOAT)


@intrinsic(lambda memory, i, distance, numbers: types.void(memory, types.intp, types.intp, vector))
def store_weights(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    """Round 16 numbers. Store their upper bytes at i, and their lower bytes at i + distance, both unsigned."""
    memory, i, distance, numbers = args
    whole = rounded_words(builder, numbers)
    for half, place in ((builder.lshr(whole, constant(WORDS, 8)), i), (whole, builder.add(i, distance))):
        few = builder.trunc(half, sixteen(BYTE))
        builder.store(few, element(context, builder, memory, place, few.type), align=1)
    return context.get_dummy_value()


@intrinsic(lambda sums, q, rows, half, pool, quads, i: sums(sums, q, rows, types.intp, pool, quads, types.intp))
def add_keys(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    """Add the products of the line at i of each quad and both bytes of each row of q.

    The sums are int32 bits in float32 vectors. 128 is added to the bytes of keys, because they must be unsigned.
    """
    sums, q, rows, half, pool, quads, i = args
    totals, at_sum = [builder.bitcast(each, WORDS) for each in parts_of(builder, sums)], 0
    lines = [load_line(context, builder, pool, place) for place in moved(builder, quads, i)]
    lines = [builder.xor(line, constant(WORDS, 0x80808080)) for line in lines]
    for row in moved(builder, rows, i):
        for place in (row, builder.add(row, half)):
            few = load_line(context, builder, q, place)
            for line in lines:
                totals[at_sum] = add_dot(builder, totals[at_sum], line, few)
                at_sum += 1
    return builder_tuple(context, builder, totals, sums)


@intrinsic(lambda sums, weights, rows, half, k, pool, place: sums(
    sums, weights, rows, types.intp, types.intp, pool, types.intp
))  # fmt: skip
def add_values(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    """Add the products of a line of values and both bytes of the four weights at k of each row."""
    sums, weights, rows, half, k, pool, place = args
    totals, line = [], load_line(context, builder, pool, place)
    before = iter(parts_of(builder, sums))
    for row in moved(builder, rows, k):
        for where in (row, builder.add(row, half)):
            word = builder.load(element(context, builder, weights, where, WORD), align=1)
            totals.append(add_dot(builder, builder.bitcast(next(before), WORDS), splatted(builder, word), line))
    return builder_tuple(context, builder, totals, sums)


def load_line(context: Any, builder: Any, memory: Any, place: Any) -> Any:
    return builder.load(element(context, builder, memory, place, WORDS), align=1)


def whole_of(builder: Any, upper: Any, lower: Any) -> Any:
    """Return 256 * upper + lower, for integer sums."""
    shifted = builder.shl(builder.bitcast(upper, WORDS), constant(WORDS, 8))
    return builder.add(shifted, builder.bitcast(lower, WORDS))


@intrinsic(lambda sums, rows: types.UniTuple(vector, len(rows))(sums, rows))
def joined(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    """Join the sums of the upper and the lower bytes of each row into one float32 vector."""
    sums = parts_of(builder, args[0])
    values = [whole_of(builder, upper, lower) for upper, lower in zip(sums[::2], sums[1::2], strict=True)]
    return tuple_of([builder.sitofp(value, FLOATS) for value in values], context, builder, signature)


@intrinsic(lambda first, second, q_sums, q_scales, rows: types.UniTuple(vector, len(rows))(
    first, second, q_sums, q_scales, rows
))  # fmt: skip
def scores_of(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    """Return each row's scores of 16 keys, without the keys' scales.

    `first` and `second` are the sums of add_keys() for two quads each.
    """
    quarters = [range(start, start + 4) for start in range(0, 2 * WIDTH, 4)]

    def join(a: Any, b: Any, low: tuple[int, ...]) -> Any:
        lanes = [[lane for i in low for lane in quarters[i + more]] for more in (0, 2 if low[1] == 1 else 1)]
        return builder.add(*(shuffled(builder, a, b, each) for each in lanes))

    pairs, values = [parts_of(builder, each) for each in args[:2]], []
    for r, row in enumerate(parts_of(builder, args[4])):
        quads = [whole_of(builder, both[4 * r + k], both[4 * r + 2 + k]) for both in pairs for k in (0, 1)]
        halves = join(quads[0], quads[1], (0, 1, 4, 5)), join(quads[2], quads[3], (0, 1, 4, 5))
        dots = join(*halves, (0, 2, 4, 6))
        above, scale = (splatted(builder, builder.load(builder.gep(args[i], [row]))) for i in (2, 3))
        dots = builder.sub(dots, builder.fptosi(above, WORDS))
        values.append(builder.fmul(builder.sitofp(dots, FLOATS), scale))
    return tuple_of(values, context, builder, signature)
