"""Blocks of vectors: the registers in which a kernel multiplies several rows of one matrix by several rows of another.

    sums = no_sums(a, b)
    for i in range(0, size, WIDTH):
        sums = outer(sums, load_rows(a, rows_of_a, i), load_rows(b, rows_of_b, i))

A product of two numbers from memory has to wait for two loads. In a block each loaded number takes part in as many
products as the other side has rows, so the loads are shared. The number of rows is the length of the tuple with their
start positions: the compiler knows it, and unrolls all rows.

The second half is for vectors of scores, which hold several rows: lane k * rows + r belongs to key k and row r. See
attention.py.
"""

from typing import Any

from llvmlite import ir
from numba import types

from .vectors import (
    FLOATS,
    FUSED,
    WIDTH,
    WORD,
    WORDS,
    constant,
    element,
    intrinsic,
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


def shuffled(builder: Any, a: Any, b: Any, lanes: list[int]) -> Any:
    """Return the given lanes of a, numbered from 0, and of b, numbered from 16."""
    return builder.shuffle_vector(a, b, ir.Constant(WORDS, lanes))


def sum_2(builder: Any, a: Any, b: Any) -> Any:
    return builder.fadd(a, b, flags=FUSED)


@intrinsic
def load_rows(typing: Any, memory: Any, starts: Any, i: Any) -> Any:
    """Return one vector of each row: memory[start + i ..] for each of `starts`."""
    read = reader(sixteen)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        where = [builder.add(start, args[2]) for start in parts_of(builder, args[1])]
        loaded = [read(context, builder, signature, (args[0], start)) for start in where]
        return tuple_of(loaded, context, builder, signature)

    return types.UniTuple(vector, len(starts))(memory, starts, types.intp), generate


@intrinsic
def store_rows(typing: Any, memory: Any, starts: Any, columns: Any, block: Any) -> Any:
    """Set memory[start + column ..] to the block's vectors, row by row."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        values, dtype = iter(parts_of(builder, args[3])), signature.args[0].dtype
        for start in parts_of(builder, args[1]):
            for column in parts_of(builder, args[2]):
                value, place = rounded(builder, dtype, next(values), sixteen), builder.add(start, column)
                builder.store(value, element(context, builder, args[0], place, value.type), align=2)
        return context.get_dummy_value()

    return types.void(memory, starts, columns, block), generate


@intrinsic
def load_block(typing: Any, memory: Any, starts: Any, columns: Any) -> Any:
    """Return the block that store_rows() stores."""
    read = reader(sixteen)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        starts, columns = parts_of(builder, args[1]), parts_of(builder, args[2])
        where = [builder.add(start, column) for start in starts for column in columns]
        return tuple_of([read(context, builder, signature, (args[0], i)) for i in where], context, builder, signature)

    return types.UniTuple(vector, len(starts) * len(columns))(memory, starts, columns), generate


@intrinsic
def no_sums(typing: Any, a: Any, b: Any) -> Any:
    """Return a block of len(a) * len(b) zero vectors for outer()."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return tuple_of([constant(FLOATS, 0)] * len(signature.return_type), context, builder, signature)

    return types.UniTuple(vector, len(a) * len(b))(a, b), generate


@intrinsic
def outer(typing: Any, sums: Any, a: Any, b: Any) -> Any:
    """Return sums[i, j] + a[i] * b[j] for each i and j."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        before = iter(parts_of(builder, args[0]))
        pairs = [(x, y) for x in parts_of(builder, args[1]) for y in parts_of(builder, args[2])]
        values = [sum_2(builder, builder.fmul(x, y, flags=FUSED), next(before)) for x, y in pairs]
        return tuple_of(values, context, builder, signature)

    return sums(sums, a, b), generate


@intrinsic
def scaled(typing: Any, block: Any, factors: Any) -> Any:
    """Return block[i, j] * factors[i] for each i and j."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        values, factors = parts_of(builder, args[0]), parts_of(builder, args[1])
        columns = len(values) // len(factors)
        products = [builder.fmul(x, factors[i // columns], flags=FUSED) for i, x in enumerate(values)]
        return tuple_of(products, context, builder, signature)

    return block(block, factors), generate


@intrinsic
def splats(typing: Any, memory: Any, i: Any, rows: Any) -> Any:
    """Return a vector of 16 copies for each of the numbers memory[i], memory[i + 1], ..., one for each row."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        values = []
        for row in range(len(signature.return_type)):
            number = builder.load(builder.gep(args[0], [builder.add(args[1], ir.Constant(args[1].type, row))]))
            first = builder.insert_element(ir.Constant(FLOATS, ir.Undefined), number, WORD(0))
            values.append(shuffled(builder, first, first, [0] * WIDTH))
        return tuple_of(values, context, builder, signature)

    return types.UniTuple(vector, len(rows))(memory, types.intp, rows), generate


@intrinsic
def sums_of(typing: Any, sums: Any) -> Any:
    """Return one vector whose lane i is the sum of the vector sums[i], for 1, 2, 4, 8 or 16 vectors."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        values = parts_of(builder, args[0])
        return sums_of_16(builder, values) if len(values) == WIDTH else sums_of_few(builder, values)

    return vector(sums), generate


def sums_of_few(builder: Any, values: list[Any]) -> Any:
    """Add up to 8 vectors, each across its lanes.

    Pairs of vectors are joined into one, half from each, until a single vector is left; then its parts are folded.
    """

    def join(a: Any, b: Any) -> Any:
        low = [start + i for start in range(0, 2 * WIDTH, each) for i in range(each // 2)]
        return sum_2(builder, shuffled(builder, a, b, low), shuffled(builder, a, b, [i + each // 2 for i in low]))

    count, each = len(values), WIDTH  # lanes per value
    while len(values) > 1:
        values, each = [join(a, b) for a, b in zip(values[::2], values[1::2], strict=True)], each // 2
    (sums,), distance = values, each
    while distance := distance // 2:
        moved = [i // each * each + (i + distance) % each for i in range(WIDTH)]
        sums = sum_2(builder, sums, shuffled(builder, sums, sums, moved))
    return shuffled(builder, sums, sums, [i % count * each for i in range(WIDTH)])


def sums_of_16(builder: Any, values: list[Any]) -> Any:
    """Add 16 vectors, each across its lanes: every step joins pairs of vectors, and half as many are left."""

    def join(a: Any, b: Any, low: list[int], high: list[int]) -> Any:
        return sum_2(builder, shuffled(builder, a, b, low), shuffled(builder, a, b, high))

    def join_all(values: list[Any], low: list[int], high: list[int]) -> list[Any]:
        return [join(a, b, low, high) for a, b in zip(values[::2], values[1::2], strict=True)]

    quarters = range(0, WIDTH, 4)  # moves inside a quarter of a register are cheap
    pairs = [[[q + i + j for q in quarters for i in k for j in (0, 16)] for k in ((0, 1), (2, 3))]]
    pairs += [[[q + i + j for q in quarters for j in (0, 16) for i in k] for k in ((0, 1), (2, 3))]]
    pairs += [[[q + i for q in (k, k + 8, k + 16, k + 24) for i in range(4)] for k in (0, 4)]] * 2
    for low, high in pairs:
        values = join_all(values, low, high)
    return values[0]


@intrinsic
def prefetch(typing: Any, memory: Any, i: Any) -> Any:
    """Start to load the cache line of element i, ahead of its use."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = builder.bitcast(builder.gep(args[0], [args[1]]), ir.IntType(8).as_pointer())
        function_type = ir.FunctionType(ir.VoidType(), [pointer.type, WORD, WORD, WORD])
        function = builder.module.declare_intrinsic("llvm.prefetch", [pointer.type], function_type)
        builder.call(function, [pointer, WORD(0), WORD(3), WORD(1)])  # for reading, into L1, data
        return context.get_dummy_value()

    return types.void(memory, types.intp), generate


@intrinsic
def per_line(typing: Any, memory: Any) -> Any:
    """Return how many numbers a cache line of 64 bytes holds."""
    count = 64 * 8 // memory.dtype.bitwidth
    return types.intp(memory), lambda context, builder, signature, args: context.get_constant(types.intp, count)


@intrinsic
def starts_of(typing: Any, rows: Any, size: Any) -> Any:
    """Return the start positions of these rows, which have `size` numbers each."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        starts = [builder.mul(row, args[1]) for row in parts_of(builder, args[0])]
        return tuple_of(starts, context, builder, signature)

    return rows(rows, types.intp), generate


@intrinsic
def places_of(typing: Any, places: Any, t: Any, rows: Any) -> Any:
    """Return the places t, t + 1, ..., as many as make 16 pairs with the rows."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        steps = [builder.add(args[1], ir.Constant(args[1].type, i)) for i in range(len(signature.return_type))]
        return tuple_of([builder.load(builder.gep(args[0], [i])) for i in steps], context, builder, signature)

    return types.UniTuple(types.int64, WIDTH // len(rows))(places, types.intp, rows), generate


@intrinsic
def products_at(typing: Any, a: Any, starts_a: Any, b: Any, starts_b: Any, i: Any) -> Any:
    """Return the products of number i of each row of a and of each row of b.

    Lane k * len(starts_b) + r holds the product of row k of a and row r of b.
    """
    read = reader(one)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        def numbers(memory: int) -> list[Any]:
            typed = signature.return_type(*signature.args[memory : memory + 1])
            where = [builder.add(start, args[4]) for start in parts_of(builder, args[memory + 1])]
            return [read(context, builder, typed, (args[memory], start)) for start in where]

        whole, left, right = ir.Constant(FLOATS, ir.Undefined), numbers(0), numbers(2)
        products = [builder.fmul(x, y, flags=FUSED) for x in left for y in right]
        for lane, product in enumerate(products):
            whole = builder.insert_element(whole, product, WORD(lane))
        return whole

    return vector(a, starts_a, b, starts_b, types.intp), generate


# Vectors with one lane, or several, for each row


@intrinsic
def spread(typing: Any, memory: Any, places: Any) -> Any:
    """Return a vector with memory[places[i]] in all lanes of row i: the lanes i, i + len(places), ..."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        numbers = [builder.load(builder.gep(args[0], [place])) for place in parts_of(builder, args[1])]
        whole = ir.Constant(FLOATS, ir.Undefined)
        for i, number in enumerate(numbers):
            whole = builder.insert_element(whole, number, WORD(i))
        return shuffled(builder, whole, whole, [i % len(numbers) for i in range(WIDTH)])

    return vector(memory, places), generate


def folding(combine: Any) -> Any:
    """Generate code that combines the lanes of each row, and leaves the result in all of them."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        numbers, distance = args[0], WIDTH
        while (distance := distance // 2) >= len(signature.args[1]):
            moved = shuffled(builder, numbers, numbers, [(i + distance) % WIDTH for i in range(WIDTH)])
            numbers = combine(builder, numbers, moved)
        return numbers

    return generate


@intrinsic
def largest_of_rows(typing: Any, numbers: Any, rows: Any) -> Any:
    def larger(builder: Any, a: Any, b: Any) -> Any:
        return builder.select(builder.fcmp_ordered(">", a, b), a, b)

    return vector(vector, rows), folding(larger)


@intrinsic
def sums_of_rows(typing: Any, numbers: Any, rows: Any) -> Any:
    return vector(vector, rows), folding(sum_2)


@intrinsic
def lanes_of_rows(typing: Any, numbers: Any, rows: Any) -> Any:
    """Return one vector for each row, with the row's lane 16 times."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        lanes = [shuffled(builder, args[0], args[0], [row] * WIDTH) for row in range(len(signature.args[1]))]
        return tuple_of(lanes, context, builder, signature)

    return types.UniTuple(vector, len(rows))(vector, rows), generate


@intrinsic
def write_rows(typing: Any, memory: Any, places: Any, numbers: Any) -> Any:
    """Set memory[places[i]] to the lane of row i: the inverse of spread()."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        for i, place in enumerate(parts_of(builder, args[1])):
            builder.store(builder.extract_element(args[2], WORD(i)), builder.gep(args[0], [place]))
        return context.get_dummy_value()

    return types.void(memory, places, vector), generate


@intrinsic
def limits(typing: Any, rows: Any, group: Any, before: Any, count: Any) -> Any:
    """Return limits: row r may see key t + k if t is below lane k * len(rows) + r.

    That lane holds the smaller of `count` and before + r // group, minus k.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        seen = [builder.add(args[2], builder.sdiv(row, args[1])) for row in parts_of(builder, args[0])]
        seen = [builder.select(builder.icmp_signed("<", x, args[3]), x, args[3]) for x in seen]
        whole = ir.Constant(FLOATS, ir.Undefined)
        for lane in range(WIDTH):
            number = builder.sub(seen[lane % len(seen)], ir.Constant(args[2].type, lane // len(seen)))
            whole = builder.insert_element(whole, builder.sitofp(number, FLOATS.element), WORD(lane))
        return whole

    return vector(rows, types.intp, types.intp, types.intp), generate
