"""Linear layers with weights in 8 or 4 bits. ../../quantization.py describes their formats.

x is quantized, too, in groups of 32 numbers: x = x_scale * x_q, with x_q from -127 to 127. Products of integers are
exact, with q for the integers of the weight:

    sum over a group of weight * x = x_scale * (scale * sum(q * x_q) + minimum * sum(x_q))

so kernels multiply bytes, four at a time in each lane. With AVX-512 VNNI, one instruction does that for 64 bytes. AVX2
multiplies 32 bytes by integers of 4 bits in two, and takes more for 8 bits. The sums of x_q are computed once per row.
In int8, the minimum is -128 * scale. If there is one scale per output, it is applied at the end.
"""

import os
from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import binding, ir
from numba import types
from numba.core.cgutils import get_or_insert_function

from ...quantization import GROUP, Format
from .blocks import add_blocks, load_block, no_sums, parts_of, prefetch, shuffled, starts_of, store_rows, tuple_of
from .dot import splatted
from .layout import COLUMNS, SUMS, WIDTH
from .vectors import (
    BITS,
    FLOATS,
    WORD,
    WORDS,
    Memory,
    at,
    constant,
    element,
    floats,
    fused,
    inlined,
    intrinsic,
    kernel,
    largest_or_nan,
    load,
    maximum_or_nan,
    multiply,
    negative,
    pointer_to,
    read,
    sixteen,
    splat,
    vector,
    write,
)

INT4, INT4_FLOAT32, INT8, INT8_GROUPS, INT8_HALF_GROUPS, INT8_MINIMA = map(int, Format)  # Numba needs plain integers
LINE = 64  # bytes: four for each of 16 outputs
ROWS = 4  # of x, in a block of registers
BYTE = ir.IntType(8)
BYTES, SHORTS = ir.VectorType(BYTE, 4 * WIDTH), ir.VectorType(BITS, 2 * WIDTH)

octets = pointer_to(types.uint8)
halves = pointer_to(types.uint16)  # bfloat16


def has(feature: str) -> bool:
    """Return whether this processor has a feature, in LLVM's words, and Numba compiles for this processor."""
    if os.environ.get("NUMBA_CPU_NAME") or os.environ.get("NUMBA_CPU_FEATURES"):
        return False
    return bool(binding.get_host_cpu_features().get(feature))


def in_halves(builder: Any, name: str, result: ir.VectorType, *vectors: Any) -> Any:
    """Apply an instruction for 256 bits to both halves of vectors of 512 bits."""
    function_type = ir.FunctionType(halved(result), [halved(each.type) for each in vectors])
    function = builder.module.declare_intrinsic(name, (), function_type)

    def half(vector: Any, number: int) -> Any:
        size = vector.type.count // 2
        return shuffled(builder, vector, vector, [*range(number * size, number * size + size)])

    lower, upper = (builder.call(function, [half(each, number) for each in vectors]) for number in range(2))
    return shuffled(builder, lower, upper, [*range(result.count)])


def halved(vector: ir.VectorType) -> ir.VectorType:
    return ir.VectorType(vector.element, vector.count // 2)


def add_dot(builder: Any, total: Any, weight: Any, x: Any) -> Any:
    """Return total + the sum of four unsigned bytes of `weight` times four signed bytes of x, in each of 16 lanes."""
    if has("avx512vnni"):
        dot = builder.module.declare_intrinsic("llvm.x86.avx512.vpdpbusd.512", (), ir.FunctionType(WORDS, [WORDS] * 3))
        return builder.call(dot, [total, weight, x])
    if has("avxvnni"):
        return in_halves(builder, "llvm.x86.avx512.vpdpbusd.256", WORDS, total, weight, x)
    if has("avx2"):
        weight, x, eight = builder.bitcast(weight, SHORTS), builder.bitcast(x, SHORTS), constant(SHORTS, 8)
        even = builder.and_(weight, constant(SHORTS, 255)), builder.ashr(builder.shl(x, eight), eight)
        odd = builder.lshr(weight, eight), builder.ashr(x, eight)
        for pair in (even, odd):
            total = builder.add(total, in_halves(builder, "llvm.x86.avx2.pmadd.wd", WORDS, *pair))
        return total
    for byte in range(4):
        unsigned = builder.and_(builder.lshr(weight, constant(WORDS, 8 * byte)), constant(WORDS, 255))
        signed = builder.ashr(builder.shl(x, constant(WORDS, 24 - 8 * byte)), constant(WORDS, 24))
        total = builder.add(total, builder.mul(unsigned, signed))
    return total


@intrinsic(
    lambda sums, weight, columns, i, x, starts, k: sums(sums, weight, columns, types.intp, x, starts, types.intp)
)
def add_dots_8(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    """Add the products of 4 numbers of each row of x and 4 weights of each of 16 outputs: 64 bytes of a column.

    The sums are int32 bits in float32 vectors.
    """
    return add_dots(context, builder, args, lambda both: [both])


@intrinsic(
    lambda sums, weight, columns, i, x, starts, k: sums(sums, weight, columns, types.intp, x, starts, types.intp)
)
def add_dots_4(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    """Add the products of 8 numbers of each row of x: 4 with the lower halves of 64 bytes, 4 with the upper halves.

    sums_of_words() returns the sums of a group.
    """
    mask = constant(WORDS, 0x0F0F0F0F)

    def halves_of(both: Any) -> list[Any]:
        return [builder.and_(both, mask), builder.and_(builder.lshr(both, constant(WORDS, 4)), mask)]

    return add_dots(context, builder, args, halves_of, add_short_dot if has_short_dots() else add_dot)


def has_short_dots() -> bool:
    """Return whether the sums of a group in 4 bits are 32 integers of 16 bits, and not 16 of 32 bits."""
    return has("avx2") and not has("avx512vnni") and not has("avxvnni")


def add_short_dot(builder: Any, total: Any, weight: Any, x: Any) -> Any:
    """Return total + the sums of two unsigned bytes of `weight` times two signed bytes of x, in each of 32 lanes.

    In a group, a lane is the sum of 16 products of at most 15 * 127, so it fits into 16 bits.
    """
    weight, x = (builder.bitcast(each, BYTES) for each in (weight, x))
    products = in_halves(builder, "llvm.x86.avx2.pmadd.ub.sw", SHORTS, weight, x)
    return builder.bitcast(builder.add(builder.bitcast(total, SHORTS), products), WORDS)


@intrinsic(lambda sums: sums(sums))
def sums_of_words(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    """Return the sums of add_dots_4() as int32 bits in float32 vectors."""
    if not has_short_dots():
        return args[0]
    shorts = [builder.bitcast(each, SHORTS) for each in parts_of(builder, args[0])]
    ones = constant(SHORTS, 1)
    words = [in_halves(builder, "llvm.x86.avx2.pmadd.wd", WORDS, each, ones) for each in shorts]
    return tuple_of([builder.bitcast(each, FLOATS) for each in words], context, builder, signature)


def add_dots(context: Any, builder: Any, args: Any, divide: Any, add: Any = add_dot) -> Any:
    sums, weight, columns, i, x, starts, k = args
    totals = [builder.bitcast(each, WORDS) for each in parts_of(builder, sums)]
    places = [builder.add(column, i) for column in parts_of(builder, columns)]
    loaded = [builder.load(element(context, builder, weight, place, WORDS), align=1) for place in places]
    divided = [divide(each) for each in loaded]
    for m, start in enumerate(parts_of(builder, starts)):
        for part in range(len(divided[0])):
            place = builder.add(builder.add(start, k), ir.Constant(k.type, 4 * part))
            word = builder.load(element(context, builder, x, place, WORD), align=1)
            four = splatted(builder, word)
            for c, each in enumerate(divided):
                at_c = m * len(divided) + c
                totals[at_c] = add(builder, totals[at_c], each[part], four)
    return builder_tuple(context, builder, totals, sums)


def builder_tuple(context: Any, builder: Any, totals: list[Any], like: Any) -> Any:
    result = like
    for i, total in enumerate(totals):
        result = builder.insert_value(result, builder.bitcast(total, FLOATS), i)
    return result


@intrinsic(lambda totals, sums, scale, minimum, x_scales, x_sums, starts, g, part: totals(
    totals, sums, scale, minimum, x_scales, x_sums, starts, types.intp, types.intp
))  # fmt: skip
def add_group(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    """Return totals[m, c] + x_scales[m] * (scale[c] * sums[m, c] + minimum[c] * x_sums[m]) for a part of a group."""
    totals, sums, scales, minima = (parts_of(builder, each) for each in args[:4])
    values = []
    for m, start in enumerate(parts_of(builder, args[6])):
        place = builder.add(start, args[7])
        at_sum = builder.add(builder.mul(place, ir.Constant(place.type, SUMS)), args[8])
        both = (args[4], place), (args[5], at_sum)
        x_scale, x_sum = (splatted(builder, builder.load(builder.gep(each, [i]))) for each, i in both)
        for c, (scale, minimum) in enumerate(zip(scales, minima, strict=True)):
            number = builder.sitofp(builder.bitcast(sums[m * len(scales) + c], WORDS), FLOATS)
            group = fused(builder, number, scale, builder.fmul(minimum, x_sum))
            values.append(fused(builder, group, x_scale, totals[m * len(scales) + c]))
    return tuple_of(values, context, builder, signature)


def loader_of(to_float: Callable[[Any, Any], Any]) -> Any:
    """Return an intrinsic that loads the line at byte i of each column, and turns each word into a float32."""

    @intrinsic(lambda memory, columns, i: types.UniTuple(vector, len(columns))(memory, columns, types.intp))
    def load_line(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        places = [builder.add(column, args[2]) for column in parts_of(builder, args[1])]
        words = [builder.load(element(context, builder, args[0], place, WORDS), align=4) for place in places]
        values = [builder.bitcast(to_float(builder, word), FLOATS) for word in words]
        return tuple_of(values, context, builder, signature)

    return load_line


load_float32 = loader_of(lambda builder, words: words)
load_lower = loader_of(lambda builder, words: builder.shl(words, constant(WORDS, 16)))  # bfloat16
load_upper = loader_of(lambda builder, words: builder.and_(words, constant(WORDS, 0xFFFF0000)))


@intrinsic(lambda totals, scales: totals(totals, scales))
def scaled_columns(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    """Return totals[m, c] * scales[c] for each m and c."""
    totals, scales = parts_of(builder, args[0]), parts_of(builder, args[1])
    values = [builder.fmul(total, scales[i % len(scales)]) for i, total in enumerate(totals)]
    return tuple_of(values, context, builder, signature)


@intrinsic(lambda memory, i, numbers: types.float32(memory, types.intp, vector))
def store_bytes(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    """Round 16 numbers, store them as the bytes memory[i] to memory[i + 15], and return their sum."""
    round_to = get_or_insert_function(builder.module, ir.FunctionType(FLOATS, [FLOATS]), "llvm.rint.v16f32")
    words = builder.fptosi(builder.call(round_to, [args[2]]), WORDS)
    few = builder.trunc(words, sixteen(BYTE))
    builder.store(few, element(context, builder, args[0], args[1], few.type), align=1)
    add_all = get_or_insert_function(builder.module, ir.FunctionType(WORD, [WORDS]), "llvm.vector.reduce.add.v16i32")
    return builder.sitofp(builder.call(add_all, [words]), ir.FloatType())


@kernel
def quantize_rows(x: Memory, rows: int, size: int, values: Memory, scales: Memory, sums: Memory) -> None:
    """Quantize x [rows, size]: int8 values, and float32 scales [rows, size / 32] and sums [rows, size / 32, SUMS].

    A group with NaN gets the scale NaN.
    """
    for g in range(rows * size // GROUP):
        a, b = load(x, g * GROUP), load(x, g * GROUP + WIDTH)
        highest = maximum_or_nan(maximum_or_nan(a, negative(a)), maximum_or_nan(b, negative(b)))
        peak = largest_or_nan(highest)
        per_step = splat(np.float32(127) / peak if peak > 0 else np.float32(0))
        first = store_bytes(values, g * GROUP, multiply(a, per_step))
        second = store_bytes(values, g * GROUP + WIDTH, multiply(b, per_step))
        write(scales, g, peak * np.float32(1 / 127))
        write(sums, g * SUMS, first + second)
        write(sums, g * SUMS + 1, first)
        write(sums, g * SUMS + 2, second)


@kernel
def quantized_matmul(
    x: Memory, x_scales: Memory, x_sums: Memory, rows: int, size: int, weight: Memory, scales: Memory, lines: int,
    bias: Memory, start: int, end: int, outputs: int, out: Memory, stride: int, adds: bool, tile: Memory,
) -> None:  # fmt: skip
    """Set out[m, r] to x[m] * weight[r] + bias[r] for r from start to end - 1, with `start` a multiple of COLUMNS.

    x as quantize_rows() makes it; weight, scales and lines (a Format) as in quantization.py; out [rows, stride]; tile
    float32 [rows, COLUMNS] is scratch space. With `adds`, add to out.
    """
    groups, last = size // GROUP, rows - 1  # the last row may appear several times in a block
    for r in range(start, end, COLUMNS):
        some = at(weight, r // WIDTH * groups * lines * LINE)
        is_whole, more = r + COLUMNS <= outputs, at(bias, r)
        to, by = (at(out, r), stride) if is_whole else (tile, COLUMNS)
        is_sum = adds and is_whole
        if rows == 1:
            quantized_block(x, x_scales, x_sums, (0,), size, some, at(scales, r), lines, more, to, by, is_sum)
        elif rows == 2:
            quantized_block(x, x_scales, x_sums, (0, 1), size, some, at(scales, r), lines, more, to, by, is_sum)
        else:
            for m in range(0, rows, ROWS):
                four = m, min(m + 1, last), min(m + 2, last), min(m + 3, last)
                quantized_block(x, x_scales, x_sums, four, size, some, at(scales, r), lines, more, to, by, is_sum)
        if not is_whole:
            for m in range(rows):
                for c in range(outputs - r):
                    before = read(out, m * stride + r + c) if adds else np.float32(0)
                    write(out, m * stride + r + c, before + read(tile, m * COLUMNS + c))


@kernel
def quantized_block(
    x: Memory, x_scales: Memory, x_sums: Memory, rows: tuple[int, ...], size: int, weight: Memory, scales: Memory,
    lines: int, bias: Memory, out: Memory, stride: int, adds: bool,
) -> None:  # fmt: skip
    """Multiply some rows of x by the weights of 32 outputs.

    Each format has a separate loop: LLVM would move all loads ahead of a branch in the loop, and run out of registers.
    """
    starts, groups_of, to = starts_of(rows, size), starts_of(rows, size // GROUP), starts_of(rows, stride)
    totals, groups, each = no_sums(rows, (0, 1)), size // GROUP, lines * LINE
    columns, ahead = (0, each * groups), 2 * each * groups
    one, zero = splat(np.float32(1)), splat(np.float32(-128))
    if lines == INT4:
        for g in range(groups):
            i = g * each
            sums = sums_4(rows, weight, columns, i, x, starts, g * GROUP)
            prefetch_lines(weight, columns, i + ahead, INT4)
            i += 4 * LINE
            scale, minimum = load_lower(weight, columns, i), load_upper(weight, columns, i)
            totals = add_group(totals, sums, scale, minimum, x_scales, x_sums, groups_of, g, 0)
    elif lines == INT4_FLOAT32:
        for g in range(groups):
            i = g * each
            sums = sums_4(rows, weight, columns, i, x, starts, g * GROUP)
            prefetch_lines(weight, columns, i + ahead, INT4_FLOAT32)
            i += 4 * LINE
            scale, minimum = load_float32(weight, columns, i), load_float32(weight, columns, i + LINE)
            totals = add_group(totals, sums, scale, minimum, x_scales, x_sums, groups_of, g, 0)
    elif lines == INT8:
        for g in range(groups):
            i = g * each
            sums = sums_8(rows, weight, columns, i, x, starts, g * GROUP, 8)
            prefetch_lines(weight, columns, i + ahead, INT8)
            totals = add_group(totals, sums, (one, one), (zero, zero), x_scales, x_sums, groups_of, g, 0)
        totals = scaled_columns(totals, (load(scales, 0), load(scales, WIDTH)))
    elif lines == INT8_GROUPS:
        for g in range(groups):
            i = g * each
            sums = sums_8(rows, weight, columns, i, x, starts, g * GROUP, 8)
            prefetch_lines(weight, columns, i + ahead, INT8_GROUPS)
            scale = load_float32(weight, columns, i + INT8 * LINE)
            minimum = scaled_columns(scale, (zero, zero))
            totals = add_group(totals, sums, scale, minimum, x_scales, x_sums, groups_of, g, 0)
    elif lines == INT8_HALF_GROUPS:
        for g in range(groups):
            i = g * each
            prefetch_lines(weight, columns, i + ahead, INT8_HALF_GROUPS)
            for part in range(2):
                sums = sums_8(rows, weight, columns, i + part * 4 * LINE, x, starts, g * GROUP + part * WIDTH, 4)
                scale = load_float32(weight, columns, i + (INT8 + part) * LINE)
                minimum = scaled_columns(scale, (zero, zero))
                totals = add_group(totals, sums, scale, minimum, x_scales, x_sums, groups_of, g, 1 + part)
    else:
        for g in range(groups):
            i = g * each
            prefetch_lines(weight, columns, i + ahead, INT8_MINIMA)
            for part in range(2):
                sums = sums_8(rows, weight, columns, i + part * 4 * LINE, x, starts, g * GROUP + part * WIDTH, 4)
                place = i + (INT8 + part) * LINE
                scale, minimum = load_float32(weight, columns, place), load_float32(weight, columns, place + 2 * LINE)
                minimum = add_blocks(scaled_columns(scale, (zero, zero)), minimum)
                totals = add_group(totals, sums, scale, minimum, x_scales, x_sums, groups_of, g, 1 + part)
    totals = add_blocks(totals, load_block(bias, starts_of(rows, 0), (0, WIDTH)))
    if adds:
        totals = add_blocks(totals, load_block(out, to, (0, WIDTH)))
    store_rows(out, to, (0, WIDTH), totals)


@inlined
def sums_4(
    rows: tuple[int, ...], weight: Memory, columns: tuple[int, int], i: int, x: Memory, starts: tuple[int, ...], k: int
) -> Any:
    """Return the sums of products for a group in 4 bits. Its lines start at i, and its x at number k of each row."""
    sums = no_sums(rows, (0, 1))
    for line in range(4):
        sums = add_dots_4(sums, weight, columns, i + line * LINE, x, starts, k + 8 * line)
    return sums_of_words(sums)


@inlined
def sums_8(
    rows: tuple[int, ...], weight: Memory, columns: tuple[int, int], i: int, x: Memory, starts: tuple[int, ...], k: int,
    lines: int,
) -> Any:  # fmt: skip
    """Do the same as sums_4() for a group of `lines` lines in 8 bits."""
    sums = no_sums(rows, (0, 1))
    for line in range(lines):
        sums = add_dots_8(sums, weight, columns, i + line * LINE, x, starts, k + 4 * line)
    return sums


@inlined
def prefetch_lines(weight: Memory, columns: tuple[int, int], i: int, lines: int) -> None:
    """Prefetch the lines of a group at i of each column."""
    for line in range(lines):
        prefetch(weight, columns[0] + i + line * LINE)
        prefetch(weight, columns[1] + i + line * LINE)


@kernel
def quantized_number(weight: int, scales: int, row: int, i: int, size: int, lines: int) -> float:
    """Return number i of a row of a weight. `weight` and `scales` are addresses."""
    group, k = row // WIDTH * (size // GROUP) + i // GROUP, i % GROUP
    start = weight + group * lines * LINE + row % WIDTH * 4  # of this output's bytes in the group's first line
    if lines <= INT4_FLOAT32:
        both, place = octet(octets(start), k // 8 * LINE + k % 4), start + 4 * LINE
        q = np.float32(both >> 4 if k % 8 >= 4 else both & 15)
        if lines == INT4:
            scale, minimum = read(halves(place), 0), read(halves(place), 1)
        else:
            scale, minimum = read(floats(place), 0), read(floats(place), LINE // 4)
        number: float = q * scale + minimum
        return number
    q = np.float32(octet(octets(start), k // 4 * LINE + k % 4) - 128)
    if lines == INT8:
        number = q * read(floats(scales), row)
    else:
        part = k // WIDTH if lines >= INT8_HALF_GROUPS else 0
        scale = floats(start + (INT8 + part) * LINE)
        number = q * read(scale, 0)
        if lines == INT8_MINIMA:
            number += read(scale, 2 * LINE // 4)
    return number


@intrinsic(lambda memory, i: types.intp(memory, types.intp))
def octet(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    """Return byte i, from 0 to 255."""
    return builder.zext(builder.load(builder.gep(args[0], [args[1]])), ir.IntType(64))
