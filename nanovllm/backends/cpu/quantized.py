"""Linear layers with weights in 8 to 4 bits. ../../quantization.py describes their formats.

x is quantized, too, in groups of 32 numbers: x = x_scale * x_q, with x_q from -127 to 127. Products of integers are
exact, with q for the integers of the weight:

    sum over a group of weight * x = x_scale * (scale * sum(q * x_q) + minimum * sum(x_q))

so kernels multiply bytes, four at a time in each lane. With AVX-512 VNNI, one instruction does that for 64 bytes. AVX2
multiplies 32 bytes by integers of 4 to 6 bits in two, and takes more for 8 bits. The sums of x_q are computed once per
row. Formats without minima have that of their zero point: -128 * scale in int8. If there is one scale per output, it is
applied at the end.
"""

import os
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from llvmlite import binding, ir
from numba import types
from numba.core.cgutils import get_or_insert_function

from ...quantization import BLOCKS, GROUP, LINE, LINES, UPPER_BITS, Format
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
    from_half,
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

# Numba needs plain integers
INT4, INT5, INT4_FLOAT32, INT4_K, INT5_K, INT4_HALVES_K, INT6_K, INT8, INT8_GROUPS = map(int, Format)
BITS_OF, PARTS = (0, *(each.bits for each in Format)), (0, *(each.parts for each in Format))
ZERO_POINTS = 0, *(each.zero_point for each in Format)
ROWS = 4  # of x, in a block of registers
BYTE = ir.IntType(8)
BYTES, SHORTS = ir.VectorType(BYTE, 4 * WIDTH), ir.VectorType(BITS, 2 * WIDTH)

octets = pointer_to(types.uint8)
halves = pointer_to(types.int16)  # float16


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
    sums, weight, columns, i, x, starts, k = args
    words = [[line] for line in lines_of(WORDS, context, builder, weight, columns, i)]
    return add_dots(context, builder, sums, words, x, starts, k, add_dot)


def dots_of(bits: int) -> Any:
    """Return an intrinsic that adds the products of 8 numbers of each row of x and 64 bytes of a column.

    The first 4 are multiplied by the lower halves, the others by the upper halves. With 5 or 6 bits, the line at byte
    `upper` has the bits above 4, moved by `shift` for the first 4 numbers. Sums start with new_sums(), and added_sums()
    adds them to others.
    """

    @intrinsic(lambda sums, weight, columns, i, upper, shift, x, starts, k: sums(
        sums, weight, columns, types.intp, types.intp, types.intp, x, starts, types.intp
    ))  # fmt: skip
    def add(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        sums, weight, columns, i, upper, shift, x, starts, k = args
        low, four, mask = constant(WORDS, 0x0F0F0F0F), constant(WORDS, 4), constant(WORDS, UPPER_BITS.get(bits, 0))
        words = []
        for line in lines_of(WORDS, context, builder, weight, columns, i):
            words.append([builder.and_(line, low), builder.and_(builder.lshr(line, four), low)])
        for part in range(2 if bits > 4 else 0):
            move = splatted(builder, builder.add(builder.trunc(shift, WORD), WORD(part * (bits - 4))))
            for both, line in zip(words, lines_of(WORDS, context, builder, weight, columns, upper), strict=True):
                bits_above = builder.and_(builder.lshr(line, move), mask)
                both[part] = builder.or_(both[part], builder.shl(bits_above, four))
        return add_dots(context, builder, sums, words, x, starts, k, add_short_dot if has_short_dots() else add_dot)

    return add


def lines_of(stored: ir.Type, context: Any, builder: Any, weight: Any, columns: Any, i: Any) -> list[Any]:
    """Load the vector of type `stored` at byte i of each column."""
    places = [builder.add(column, i) for column in parts_of(builder, columns)]
    return [builder.load(element(context, builder, weight, place, stored), align=1) for place in places]


def has_short_dots() -> bool:
    """Return whether sums in 4 to 6 bits are 32 integers of 16 bits, and not 16 of 32 bits."""
    return has("avx2") and not has("avx512vnni") and not has("avxvnni")


def add_short_dot(builder: Any, total: Any, weight: Any, x: Any) -> Any:
    """Return total + the sums of two unsigned bytes of `weight` times two signed bytes of x, in each of 32 lanes.

    A lane can hold 16 products with integers of 4 bits, 8 of 5, or 4 of 6: each sum is at most 16 * 15 * 127, about
    8 * 31 * 127 and 4 * 63 * 127, which fit into 16 bits.
    """
    weight, x = (builder.bitcast(each, BYTES) for each in (weight, x))
    products = in_halves(builder, "llvm.x86.avx2.pmadd.ub.sw", SHORTS, weight, x)
    return builder.bitcast(builder.add(builder.bitcast(total, SHORTS), products), WORDS)


@intrinsic(lambda sums: sums(sums))
def new_sums(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    """Return what to add the next products to: 0, or `sums` themselves where sums have 32 bits."""
    return context.get_constant_null(signature.return_type) if has_short_dots() else args[0]


@intrinsic(lambda sums, more: sums(sums, sums))
def added_sums(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    """Return sums + `more`, which began as new_sums(sums), as int32 bits in float32 vectors."""
    if not has_short_dots():
        return args[1]
    ones, values = constant(SHORTS, 1), []
    for total, each in zip(*(parts_of(builder, some) for some in args), strict=True):
        words = in_halves(builder, "llvm.x86.avx2.pmadd.wd", WORDS, builder.bitcast(each, SHORTS), ones)
        values.append(builder.bitcast(builder.add(builder.bitcast(total, WORDS), words), FLOATS))
    return tuple_of(values, context, builder, signature)


def add_dots(
    context: Any, builder: Any, sums: Any, words: list[list[Any]], x: Any, starts: Any, k: Any, add: Any
) -> Any:
    """Add the products of `words`, four weights of each output of each column, and the next numbers of rows of x."""
    totals = [builder.bitcast(each, WORDS) for each in parts_of(builder, sums)]
    for m, start in enumerate(parts_of(builder, starts)):
        for part in range(len(words[0])):
            place = builder.add(builder.add(start, k), ir.Constant(k.type, 4 * part))
            word = builder.load(element(context, builder, x, place, WORD), align=1)
            four = splatted(builder, word)
            for c, each in enumerate(words):
                at_c = m * len(words) + c
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


def loader_of(stored: ir.Type, to_float: Callable[[Any, Any, Any], Any]) -> Any:
    """Return an intrinsic that loads 16 numbers of type `stored` at byte i of each column, as float32."""

    @intrinsic(lambda memory, columns, i: types.UniTuple(vector, len(columns))(memory, columns, types.intp))
    def load_params(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        memory, columns, i = args
        lines = lines_of(sixteen(stored), context, builder, memory, columns, i)
        return tuple_of([to_float(builder, line, FLOATS) for line in lines], context, builder, signature)

    return load_params


load_float32 = loader_of(ir.FloatType(), ir.IRBuilder.bitcast)
load_float16 = loader_of(BITS, lambda builder, bits, _: from_half(builder, bits))
load_int8 = loader_of(BYTE, ir.IRBuilder.sitofp)


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
    x: Memory, x_scales: Memory, x_sums: Memory, rows: int, size: int, weight: Memory, scales: Memory, format: int,
    bias: Memory, start: int, end: int, outputs: int, out: Memory, stride: int, adds: bool, tile: Memory,
) -> None:  # fmt: skip
    """Set out[m, r] to x[m] * weight[r] + bias[r] for r from start to end - 1, with `start` a multiple of COLUMNS.

    x as quantize_rows() makes it; weight, scales and format (a Format) as in quantization.py; out [rows, stride]; tile
    float32 [rows, COLUMNS] is scratch space. With `adds`, add to out.
    """
    column, last = column_bytes(size, format), rows - 1  # the last row may appear several times in a block
    for r in range(start, end, COLUMNS):
        some = at(weight, r // WIDTH * column)
        is_whole, more = r + COLUMNS <= outputs, at(bias, r)
        to, by = (at(out, r), stride) if is_whole else (tile, COLUMNS)
        is_sum = adds and is_whole
        if rows == 1:
            quantized_block(x, x_scales, x_sums, (0,), size, some, at(scales, r), format, more, to, by, is_sum)
        elif rows == 2:
            quantized_block(x, x_scales, x_sums, (0, 1), size, some, at(scales, r), format, more, to, by, is_sum)
        else:
            for m in range(0, rows, ROWS):
                four = m, min(m + 1, last), min(m + 2, last), min(m + 3, last)
                quantized_block(x, x_scales, x_sums, four, size, some, at(scales, r), format, more, to, by, is_sum)
        if not is_whole:
            for m in range(rows):
                for c in range(outputs - r):
                    before = read(out, m * stride + r + c) if adds else np.float32(0)
                    write(out, m * stride + r + c, before + read(tile, m * COLUMNS + c))


@kernel
def quantized_block(
    x: Memory, x_scales: Memory, x_sums: Memory, rows: tuple[int, ...], size: int, weight: Memory, scales: Memory,
    format: int, bias: Memory, out: Memory, stride: int, adds: bool,
) -> None:  # fmt: skip
    """Multiply some rows of x by the weights of 32 outputs.

    Each format has a separate loop: LLVM would move all loads ahead of a branch in the loop, and run out of registers.
    """
    to, totals, columns = starts_of(rows, stride), no_sums(rows, (0, 1)), (0, column_bytes(size, format))
    if format == INT4:
        totals = add_int4(totals, rows, size, weight, columns, x, x_scales, x_sums)
    elif format == INT5:
        totals = add_int5(totals, rows, size, weight, columns, x, x_scales, x_sums)
    elif format == INT4_FLOAT32:
        totals = add_int4_float32(totals, rows, size, weight, columns, x, x_scales, x_sums)
    elif format == INT4_K:
        totals = add_int4_k(totals, rows, size, weight, columns, x, x_scales, x_sums)
    elif format == INT5_K:
        totals = add_int5_k(totals, rows, size, weight, columns, x, x_scales, x_sums)
    elif format == INT4_HALVES_K:
        totals = add_int4_halves_k(totals, rows, size, weight, columns, x, x_scales, x_sums)
    elif format == INT6_K:
        totals = add_int6_k(totals, rows, size, weight, columns, x, x_scales, x_sums)
    elif format == INT8:
        totals = add_int8(totals, rows, size, weight, columns, x, x_scales, x_sums)
        totals = scaled_columns(totals, (load(scales, 0), load(scales, WIDTH)))
    else:
        totals = add_int8_groups(totals, rows, size, weight, columns, x, x_scales, x_sums)
    totals = add_blocks(totals, load_block(bias, starts_of(rows, 0), (0, WIDTH)))
    if adds:
        totals = add_blocks(totals, load_block(out, to, (0, WIDTH)))
    store_rows(out, to, (0, WIDTH), totals)


@inlined
def column_bytes(size: int, format: int) -> int:
    """Return the size of a column of a weight with rows of `size` numbers."""
    return size // BLOCKS[format] * LINES[format] * LINE


def sums_in(bits: int, per_sum: int) -> Any:
    """Return a function for integers of 4 to 6 bits. `per_sum` lines are multiplied before sums become 32 bits wide."""
    add, num_upper = dots_of(bits), bits - 4
    per_line = 4 // max(1, num_upper)  # lines that share one of upper bits

    @inlined
    def sums_of(
        rows: tuple[int, ...], weight: Memory, columns: tuple[int, int], i: int, first: int, end: int, x: Memory,
        starts: tuple[int, ...], k: int,
    ) -> Any:  # fmt: skip
        """Return the sums of products for lines `first` to end - 1 of the group at i, whose x is at k of each row."""
        sums = no_sums(rows, (0, 1))
        for start in range(first, end, per_sum):
            more = new_sums(sums)
            for line in range(start, start + per_sum):
                upper, shift = i + (4 + line // per_line) * LINE, line % per_line * 2 * num_upper
                more = add(more, weight, columns, i + line * LINE, upper, shift, x, starts, k + 8 * line)
            sums = added_sums(sums, more)
        return sums

    return sums_of


@inlined
def sums_8(
    rows: tuple[int, ...], weight: Memory, columns: tuple[int, int], i: int, first: int, end: int, x: Memory,
    starts: tuple[int, ...], k: int,
) -> Any:  # fmt: skip
    """Return the sums of products for integers of 8 bits, like the functions of sums_in()."""
    sums = no_sums(rows, (0, 1))
    for line in range(first, end):
        sums = add_dots_8(sums, weight, columns, i + line * LINE, x, starts, k + 4 * line)
    return sums


# By bits, and scales of a group
SUMS_OF = {(4, 1): sums_in(4, 4), (4, 2): sums_in(4, 2), (5, 1): sums_in(5, 2), (6, 2): sums_in(6, 1), (8, 1): sums_8}
LOADERS = {torch.float32: load_float32, torch.float16: load_float16, torch.int8: load_int8}


def loop_of(format: Format) -> Any:
    """Return a function that multiplies some rows of x by the weights of 32 outputs in a format."""
    bits, parts, groups, has_minima = format.bits, format.parts, format.groups, format.has_minima
    has_scales, has_factors, zero_point = format != Format.INT8, groups > 1, np.float32(-format.zero_point)
    sums_of, load, lines = SUMS_OF[bits, parts], LOADERS[format.dtype], (8 if bits == 8 else 4) // parts
    param, num_params = WIDTH * format.dtype.itemsize, parts * (1 + has_minima)  # bytes for 16 outputs; of a group
    block_bytes, other_lines = format.lines * LINE, format.lines - groups * bits

    @inlined
    def add_products(
        totals: Any, rows: tuple[int, ...], size: int, weight: Memory, columns: tuple[int, int], x: Memory,
        x_scales: Memory, x_sums: Memory,
    ) -> Any:  # fmt: skip
        """Return totals + the products. `columns` are the places of the two columns in `weight`, in bytes."""
        starts, groups_of = starts_of(rows, size), starts_of(rows, size // GROUP)
        one, below = splat(np.float32(1)), splat(zero_point)
        of_scales = of_minima = one, one
        ahead = 2 * columns[1]
        for block in range(size // GROUP // groups):
            first = block * block_bytes
            params, last = first + groups * bits * LINE, first + block_bytes - LINE
            prefetch_lines(weight, columns, params + ahead, other_lines)
            if has_factors:
                of_scales = load_float16(weight, columns, last)
                of_minima = load_float16(weight, columns, last + 2 * WIDTH)
            for number in range(groups):
                g, i = block * groups + number, first + number * bits * LINE
                prefetch_lines(weight, columns, i + ahead, bits)
                for part in range(parts):
                    place = params + (number * num_params + part) * param
                    sums = sums_of(rows, weight, columns, i, part * lines, (part + 1) * lines, x, starts, g * GROUP)
                    scale = scaled_columns(load(weight, columns, place) if has_scales else (one, one), of_scales)
                    if has_minima:
                        minimum = scaled_columns(load(weight, columns, place + parts * param), of_minima)
                    else:
                        minimum = scaled_columns(scale, (below, below))
                    totals = add_group(totals, sums, scale, minimum, x_scales, x_sums, groups_of, g, part + parts - 1)
        return totals

    return add_products


add_int4, add_int5, add_int4_float32, add_int4_k, add_int5_k, *others = map(loop_of, Format)
add_int4_halves_k, add_int6_k, add_int8, add_int8_groups = others


@inlined
def prefetch_lines(weight: Memory, columns: tuple[int, int], i: int, lines: int) -> None:
    """Prefetch some lines at byte i of each column."""
    for line in range(lines):
        prefetch(weight, columns[0] + i + line * LINE)
        prefetch(weight, columns[1] + i + line * LINE)


@kernel
def quantized_number(weight: int, scales: int, row: int, i: int, size: int, format: int) -> float:
    """Return number i of a row of a weight. `weight` and `scales` are addresses."""
    numbers, bits, parts, each = BLOCKS[format], BITS_OF[format], PARTS[format], LINES[format] * LINE
    g, k, c = i % numbers // GROUP, i % GROUP, row % WIDTH
    block = weight + row // WIDTH * column_bytes(size, format) + i // numbers * each
    start, params, last = block + g * bits * LINE, block + numbers // GROUP * bits * LINE, block + each - LINE
    word, byte = k // 4, 4 * c + k % 4  # the latter in a line
    if bits == 8:
        q = octet(octets(start), word * LINE + byte)
    else:
        q = octet(octets(start), word // 2 * LINE + byte) >> word % 2 * 4 & 15
    if bits == 5:
        q += (octet(octets(start), 4 * LINE + byte) >> word & 1) << 4
    elif bits == 6:
        q += (octet(octets(start), (4 + word // 4) * LINE + byte) >> word % 4 * 2 & 3) << 4
    number, minimum = np.float32(q - ZERO_POINTS[format]), np.float32(0)
    if format == INT8:
        scale = read(floats(scales), row)
    elif format == INT8_GROUPS:
        scale = read(floats(params), c)
    elif format == INT4_FLOAT32:
        scale, minimum = read(floats(params), c), read(floats(params), WIDTH + c)
    elif format in (INT4, INT5):
        scale, minimum = read(halves(params), c), read(halves(params), WIDTH + c)
    elif format == INT6_K:
        scale = read(halves(last), c) * signed(params, (2 * g + k // WIDTH) * WIDTH + c)
    else:
        place = (2 * g * parts + k * parts // GROUP) * WIDTH + c
        scale = read(halves(last), c) * signed(params, place)
        minimum = read(halves(last), WIDTH + c) * signed(params, place + parts * WIDTH)
    result: float = number * scale + minimum
    return result


@inlined
def signed(address: int, i: int) -> np.float32:
    """Return the signed byte i from an address on."""
    return np.float32((octet(octets(address), i) ^ 128) - 128)


@intrinsic(lambda memory, i: types.intp(memory, types.intp))
def octet(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    """Return byte i, from 0 to 255."""
    return builder.zext(builder.load(builder.gep(args[0], [args[1]])), ir.IntType(64))
