"""Blocks of vectors, in which kernels multiply several rows of one matrix by several rows of another in registers.

    sums = no_sums(rows_of_a, rows_of_b)
    for i in range(0, size, step_of(a, b)):
        sums = add_products(sums, a, rows_of_a, b, rows_of_b, i)  # see dot.py

A product of two numbers from memory needs two loads. In a block, each loaded number is multiplied by one number of each
row of the other matrix, so the loads are shared. Rows are given as a tuple of their start positions. The compiler
knows the length of a tuple, so it unrolls the loop over rows.

The second half is for vectors of scores, which hold several rows side by side: see attention.py.
"""

from typing import Any

from llvmlite import ir
from numba import types

from .layout import WIDTH
from .vectors import (
    FLOATS,
    WORD,
    constant,
    element,
    intrinsic,
    larger,
    one,
    reader,
    rounded,
    sixteen,
    vector,
)


def tuple_of(values: list[Any], context: Any, builder: Any, signature: Any) -> Any:
    return context.make_tuple(builder, signature.return_type, values)


def parts_of(builder: Any, many: Any) -> list[Any]:
    """Return the values of a tuple."""
    return [builder.extract_value(many, i) for i in range(len(many.type))]


def moved(builder: Any, starts: Any, distance: Any) -> list[Any]:
    """Return the start positions, each moved by `distance`."""
    return [builder.add(start, distance) for start in parts_of(builder, starts)]


def shuffled(builder: Any, a: Any, b: Any, lanes: list[int]) -> Any:
    """Return the given lanes of a, numbered from 0, and of b, numbered from 16."""
    return builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(WORD, len(lanes)), lanes))


@intrinsic(lambda memory, starts, columns, block: types.void(memory, starts, columns, block))
def store_rows(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    """Set memory[start + column ..] to the block's vectors, row by row."""
    values, dtype = iter(parts_of(builder, args[3])), signature.args[0].dtype
    for start in parts_of(builder, args[1]):
        for column in parts_of(builder, args[2]):
            value, place = rounded(builder, dtype, next(values), sixteen), builder.add(start, column)
            builder.store(value, element(context, builder, args[0], place, value.type), align=2)
    return context.get_dummy_value()


@intrinsic(lambda memory, starts, columns: types.UniTuple(vector, len(starts) * len(columns))(memory, starts, columns))
def load_block(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    """Return the block that store_rows() stored with the same arguments."""
    read = reader(sixteen)
    starts, columns = parts_of(builder, args[1]), parts_of(builder, args[2])
    where = [builder.add(start, column) for start in starts for column in columns]
    return tuple_of([read(context, builder, signature, (args[0], i)) for i in where], context, builder, signature)


@intrinsic(lambda a, b: types.UniTuple(vector, len(a) * len(b))(a, b))
def no_sums(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    """Return a block of len(a) * len(b) zero vectors, to which products are added."""
    return tuple_of([constant(FLOATS, 0)] * len(signature.return_type), context, builder, signature)


@intrinsic(lambda a, b: a(a, b))
def add_blocks(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    """Return a[i, j] + b[i, j] for each i and j."""
    pairs = zip(parts_of(builder, args[0]), parts_of(builder, args[1]), strict=True)
    return tuple_of([builder.fadd(x, y) for x, y in pairs], context, builder, signature)


@intrinsic(lambda block, factors: block(block, factors))
def scaled(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    """Return block[i, j] * factors[i] for each i and j."""
    values, factors = parts_of(builder, args[0]), parts_of(builder, args[1])
    columns = len(values) // len(factors)
    products = [builder.fmul(x, factors[i // columns]) for i, x in enumerate(values)]
    return tuple_of(products, context, builder, signature)


@intrinsic(lambda memory, i, rows: types.UniTuple(vector, len(rows))(memory, types.intp, rows))
def splats(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    """Return a vector for each row: 16 copies of memory[i], 16 copies of memory[i + 1], ..."""
    values = []
    for row in range(len(signature.return_type)):
        number = builder.load(builder.gep(args[0], [builder.add(args[1], ir.Constant(args[1].type, row))]))
        first = builder.insert_element(ir.Constant(FLOATS, ir.Undefined), number, WORD(0))
        values.append(shuffled(builder, first, first, [0] * WIDTH))
    return tuple_of(values, context, builder, signature)


@intrinsic(lambda block, a: block(block, a))
def turned(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    """Return block[i, j] as block[j, i]. There are len(a) rows i."""
    values, columns = parts_of(builder, args[0]), len(args[0].type) // len(args[1].type)
    return tuple_of([value for j in range(columns) for value in values[j::columns]], context, builder, signature)


@intrinsic(lambda sums: vector(sums))
def sums_of(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    """Return one vector whose lane i is the sum of the vector sums[i], for 1, 2, 4, 8 or 16 vectors."""
    values = parts_of(builder, args[0])
    return sums_of_16(builder, values) if len(values) == WIDTH else sums_of_few(builder, values)


def sums_of_few(builder: Any, values: list[Any]) -> Any:
    """Sum the lanes of each of up to 8 vectors.

    Pairs of vectors are joined into one, half from each, until a single vector is left. Then its parts are folded.
    """

    def join(a: Any, b: Any) -> Any:
        low = [start + i for start in range(0, 2 * WIDTH, each) for i in range(each // 2)]
        return builder.fadd(shuffled(builder, a, b, low), shuffled(builder, a, b, [i + each // 2 for i in low]))

    count, each = len(values), WIDTH  # lanes per value
    while len(values) > 1:
        values, each = [join(a, b) for a, b in zip(values[::2], values[1::2], strict=True)], each // 2
    return folded(builder, values[0], count, ir.IRBuilder.fadd)


def folded(builder: Any, numbers: Any, count: int, combine: Any) -> Any:
    """Combine the lanes of each row, which lie side by side. Lane i of the result belongs to row i % count."""
    distance = each = WIDTH // count
    while distance := distance // 2:
        lanes = [i // each * each + (i + distance) % each for i in range(WIDTH)]
        numbers = combine(builder, numbers, shuffled(builder, numbers, numbers, lanes))
    return shuffled(builder, numbers, numbers, [i % count * each for i in range(WIDTH)])


def sums_of_16(builder: Any, values: list[Any]) -> Any:
    """Sum the lanes of each of 16 vectors. Every step joins pairs of vectors, so half as many are left."""

    def join(a: Any, b: Any, low: list[int], high: list[int]) -> Any:
        return builder.fadd(shuffled(builder, a, b, low), shuffled(builder, a, b, high))

    def join_all(values: list[Any], low: list[int], high: list[int]) -> list[Any]:
        return [join(a, b, low, high) for a, b in zip(values[::2], values[1::2], strict=True)]

    quarters = range(0, WIDTH, 4)  # moves inside a quarter of a register are cheap
    pairs = [[[q + i + j for q in quarters for i in k for j in (0, 16)] for k in ((0, 1), (2, 3))]]
    pairs += [[[q + i + j for q in quarters for j in (0, 16) for i in k] for k in ((0, 1), (2, 3))]]
    pairs += [[[q + i for q in (k, k + 8, k + 16, k + 24) for i in range(4)] for k in (0, 4)]] * 2
    for low, high in pairs:
        values = join_all(values, low, high)
    return values[0]


@intrinsic(lambda memory, i: types.void(memory, types.intp))
def prefetch(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    """Start loading the cache line of element i, before it is needed.

    The line goes to L2, because L1 is too small for lines that are needed later.
    """
    pointer = builder.bitcast(builder.gep(args[0], [args[1]]), ir.IntType(8).as_pointer())
    function_type = ir.FunctionType(ir.VoidType(), [pointer.type, WORD, WORD, WORD])
    function = builder.module.declare_intrinsic("llvm.prefetch", [pointer.type], function_type)
    builder.call(function, [pointer, WORD(0), WORD(2), WORD(1)])  # for reading, into L2, data
    return context.get_dummy_value()


@intrinsic(lambda memory: types.intp(memory))
def per_line(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    """Return the number of elements in a cache line of 64 bytes."""
    count = 64 * 8 // signature.args[0].dtype.bitwidth
    return context.get_constant(types.intp, count)


@intrinsic(lambda rows, size: rows(rows, types.intp))
def starts_of(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    """Return the start positions of these rows, which have `size` numbers each."""
    starts = [builder.mul(row, args[1]) for row in parts_of(builder, args[0])]
    return tuple_of(starts, context, builder, signature)


@intrinsic(lambda places, t, rows: types.UniTuple(types.int64, WIDTH // len(rows))(places, types.intp, rows))
def places_of(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    """Return places[t], places[t + 1], ..., enough of them to form 16 pairs with the rows."""
    steps = [builder.add(args[1], ir.Constant(args[1].type, i)) for i in range(len(signature.return_type))]
    return tuple_of([builder.load(builder.gep(args[0], [i])) for i in steps], context, builder, signature)


@intrinsic(lambda a, starts_a, b, starts_b, i: vector(a, starts_a, b, starts_b, types.intp))
def products_at(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    """Return the products of number i of each row of a and number i of each row of b.

    Lane r * len(starts_a) + k holds the product of row k of a and row r of b.
    """
    read = reader(one)

    def numbers(memory: int) -> list[Any]:
        typed = signature.return_type(*signature.args[memory : memory + 1])
        where = [builder.add(start, args[4]) for start in parts_of(builder, args[memory + 1])]
        return [read(context, builder, typed, (args[memory], start)) for start in where]

    whole, left, right = ir.Constant(FLOATS, ir.Undefined), numbers(0), numbers(2)
    products = [builder.fmul(x, y) for y in right for x in left]
    for lane, product in enumerate(products):
        whole = builder.insert_element(whole, product, WORD(lane))
    return whole


# Vectors with one lane, or several, for each row


@intrinsic(lambda memory, places: vector(memory, places))
def spread(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    """Return a vector with memory[places[i]] in all lanes of row i: the lanes i, i + len(places), ..."""
    numbers = [builder.load(builder.gep(args[0], [place])) for place in parts_of(builder, args[1])]
    whole = ir.Constant(FLOATS, ir.Undefined)
    for i, number in enumerate(numbers):
        whole = builder.insert_element(whole, number, WORD(i))
    return shuffled(builder, whole, whole, [i % len(numbers) for i in range(WIDTH)])


@intrinsic(lambda numbers, rows: vector(vector, rows))
def largest_of_rows(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    """Return the largest number of each row, whose lanes lie side by side, in the lanes that spread() uses."""
    return folded(builder, args[0], len(signature.args[1]), larger)


@intrinsic(lambda numbers, rows: types.UniTuple(vector, len(rows))(vector, rows))
def lanes_of_rows(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    """Return one vector for each row r, with 16 copies of lane r of `numbers`."""
    lanes = [shuffled(builder, args[0], args[0], [row] * WIDTH) for row in range(len(signature.args[1]))]
    return tuple_of(lanes, context, builder, signature)


@intrinsic(lambda memory, places, numbers: types.void(memory, places, vector))
def write_rows(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    """Set memory[places[i]] to the lane of row i: the inverse of spread()."""
    for i, place in enumerate(parts_of(builder, args[1])):
        value = rounded(builder, signature.args[0].dtype, builder.extract_element(args[2], WORD(i)), one)
        builder.store(value, element(context, builder, args[0], place, value.type), align=2)
    return context.get_dummy_value()


@intrinsic(lambda memory, places, i, numbers: types.void(memory, places, types.intp, vector))
def store_lanes(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    """Set memory[places[r] + i ..] to the lanes of row r, which lie side by side, for each row."""
    places = moved(builder, args[1], args[2])
    each = WIDTH // len(places)
    for r, place in enumerate(places):
        few = shuffled(builder, args[3], args[3], list(range(r * each, r * each + each)))
        builder.store(few, element(context, builder, args[0], place, few.type), align=4)
    return context.get_dummy_value()


@intrinsic(lambda rows, group, before, count: vector(rows, types.intp, types.intp, types.intp))
def limits(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    """Return limits: row r may see key t + k if t is below lane k of the row's lanes, which lie side by side.

    That lane holds min(count, before + rows[r] // group) - k.
    """
    seen = [builder.add(args[2], builder.sdiv(row, args[1])) for row in parts_of(builder, args[0])]
    seen = [builder.select(builder.icmp_signed("<", x, args[3]), x, args[3]) for x in seen]
    whole, each = ir.Constant(FLOATS, ir.Undefined), WIDTH // len(seen)
    for lane in range(WIDTH):
        number = builder.sub(seen[lane // each], ir.Constant(args[2].type, lane % each))
        whole = builder.insert_element(whole, builder.sitofp(number, FLOATS.element), WORD(lane))
    return whole


@intrinsic(lambda rows: rows(rows))
def numbered(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    """Return 0, 1, ..., as many as there are rows."""
    numbers = [ir.Constant(row.type, i) for i, row in enumerate(parts_of(builder, args[0]))]
    return tuple_of(numbers, context, builder, signature)
