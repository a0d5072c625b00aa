"""Blocks of vectors: what a kernel keeps in registers while it goes through two things that meet each with each.

    sums = no_sums(a, b)
    for i in range(0, size, WIDTH):
        sums = outer(sums, load_rows(a, rows_of_a, i), load_rows(b, rows_of_b, i))

A number that was read takes part in as many products as the other side has rows: a product of two numbers from memory
waits for both of them, one of a block waits for a share. How many rows a block has is the length of the tuple that says
where they start: the compiler knows it, and writes each of them out.
"""

from typing import Any

from llvmlite import ir
from numba import types
from numba.core.extending import intrinsic

from .vectors import (
    FLOATS,
    FUSED,
    WIDTH,
    WORD,
    constant,
    element,
    reader,
    rounded,
    sixteen,
    vector,
)

WORDS = sixteen(WORD)


def tuple_of(values: list[Any], context: Any, builder: Any, signature: Any) -> Any:
    return context.make_tuple(builder, signature.return_type, values)


def parts_of(builder: Any, many: Any) -> list[Any]:
    """Return the values of a tuple."""
    return [builder.extract_value(many, i) for i in range(len(many.type))]


def shuffled(builder: Any, a: Any, b: Any, lanes: list[int]) -> Any:
    """Lanes of a, counted from 0, and of b, counted from 16."""
    return builder.shuffle_vector(a, b, ir.Constant(WORDS, lanes))


def sum_2(builder: Any, a: Any, b: Any) -> Any:
    return builder.fadd(a, b, flags=FUSED)


@intrinsic
def load_rows(typing: Any, memory: Any, starts: Any, i: Any) -> Any:
    """Return a vector of each row: memory[start + i ..] for each of `starts`."""
    read = reader(sixteen)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        where = [builder.add(start, args[2]) for start in parts_of(builder, args[1])]
        loaded = [read(context, builder, signature, (args[0], start)) for start in where]
        return tuple_of(loaded, context, builder, signature)

    return types.UniTuple(vector, len(starts))(memory, starts, types.intp), generate


@intrinsic
def store_rows(typing: Any, memory: Any, starts: Any, columns: Any, block: Any) -> Any:
    """memory[start + column ..] = the block's vectors, row by row."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        values, kind = iter(parts_of(builder, args[3])), signature.args[0].dtype
        for start in parts_of(builder, args[1]):
            for column in parts_of(builder, args[2]):
                value, place = rounded(builder, kind, next(values), sixteen), builder.add(start, column)
                builder.store(value, element(context, builder, args[0], place, value.type), align=2)
        return context.get_dummy_value()

    return types.void(memory, starts, columns, block), generate


@intrinsic
def load_block(typing: Any, memory: Any, starts: Any, columns: Any) -> Any:
    """Load what store_rows() stored."""
    read = reader(sixteen)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        starts, columns = parts_of(builder, args[1]), parts_of(builder, args[2])
        where = [builder.add(start, column) for start in starts for column in columns]
        return tuple_of([read(context, builder, signature, (args[0], i)) for i in where], context, builder, signature)

    return types.UniTuple(vector, len(starts) * len(columns))(memory, starts, columns), generate


@intrinsic
def no_sums(typing: Any, a: Any, b: Any) -> Any:
    """Return a block of zeros, for outer(sums, a, b): len(a) * len(b) vectors."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return tuple_of([constant(FLOATS, 0)] * len(signature.return_type), context, builder, signature)

    return types.UniTuple(vector, len(a) * len(b))(a, b), generate


@intrinsic
def outer(typing: Any, sums: Any, a: Any, b: Any) -> Any:
    """sums[i, j] + a[i] * b[j], for each i and j"""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        before = iter(parts_of(builder, args[0]))
        pairs = [(x, y) for x in parts_of(builder, args[1]) for y in parts_of(builder, args[2])]
        values = [sum_2(builder, builder.fmul(x, y, flags=FUSED), next(before)) for x, y in pairs]
        return tuple_of(values, context, builder, signature)

    return sums(sums, a, b), generate


@intrinsic
def scaled(typing: Any, block: Any, factors: Any) -> Any:
    """block[i, j] * factors[i]"""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        values, factors = parts_of(builder, args[0]), parts_of(builder, args[1])
        columns = len(values) // len(factors)
        products = [builder.fmul(x, factors[i // columns], flags=FUSED) for i, x in enumerate(values)]
        return tuple_of(products, context, builder, signature)

    return block(block, factors), generate


@intrinsic
def splats(typing: Any, memory: Any, i: Any, rows: Any) -> Any:
    """Return a vector of each of the next len(rows) numbers: memory[i], 16 times, memory[i + 1], 16 times, ..."""

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
    """One vector: lane i is the sum of the vector sums[i]; there are 1, 2, 4, 8 or 16 of them."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        values = parts_of(builder, args[0])
        return sums_of_16(builder, values) if len(values) == WIDTH else sums_of_few(builder, values)

    return vector(sums), generate


def sums_of_few(builder: Any, values: list[Any]) -> Any:
    """Two vectors become one, each in half of it, until there is one; what each has of it is folded then."""

    def join(a: Any, b: Any) -> Any:
        low = [start + i for start in range(0, 2 * WIDTH, each) for i in range(each // 2)]
        return sum_2(builder, shuffled(builder, a, b, low), shuffled(builder, a, b, [i + each // 2 for i in low]))

    count, each = len(values), WIDTH  # lanes that a value has
    while len(values) > 1:
        values, each = [join(a, b) for a, b in zip(values[::2], values[1::2], strict=True)], each // 2
    (sums,), distance = values, each
    while distance := distance // 2:
        moved = [i // each * each + (i + distance) % each for i in range(WIDTH)]
        sums = sum_2(builder, sums, shuffled(builder, sums, sums, moved))
    return shuffled(builder, sums, sums, [i % count * each for i in range(WIDTH)])


def sums_of_16(builder: Any, values: list[Any]) -> Any:
    """Half as many vectors after each step, each of two."""

    def join(a: Any, b: Any, low: list[int], high: list[int]) -> Any:
        return sum_2(builder, shuffled(builder, a, b, low), shuffled(builder, a, b, high))

    def join_all(values: list[Any], low: list[int], high: list[int]) -> list[Any]:
        return [join(a, b, low, high) for a, b in zip(values[::2], values[1::2], strict=True)]

    quarters = range(0, WIDTH, 4)  # what moves inside a quarter of a register is cheap
    pairs = [[[q + i + j for q in quarters for i in k for j in (0, 16)] for k in ((0, 1), (2, 3))]]
    pairs += [[[q + i + j for q in quarters for j in (0, 16) for i in k] for k in ((0, 1), (2, 3))]]
    pairs += [[[q + i for q in (k, k + 8, k + 16, k + 24) for i in range(4)] for k in (0, 4)]] * 2
    for low, high in pairs:
        values = join_all(values, low, high)
    return values[0]


@intrinsic
def prefetch(typing: Any, memory: Any, i: Any) -> Any:
    """Ask for the cache line of element i, before it is needed."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = builder.bitcast(builder.gep(args[0], [args[1]]), ir.IntType(8).as_pointer())
        kind = ir.FunctionType(ir.VoidType(), [pointer.type, WORD, WORD, WORD])
        function = builder.module.declare_intrinsic("llvm.prefetch", [pointer.type], kind)
        builder.call(function, [pointer, WORD(0), WORD(3), WORD(1)])  # to read, into the nearest cache, data
        return context.get_dummy_value()

    return types.void(memory, types.intp), generate


@intrinsic
def per_line(typing: Any, memory: Any) -> Any:
    """Return how many numbers a cache line of 64 bytes has."""
    count = 64 * 8 // memory.dtype.bitwidth
    return types.intp(memory), lambda context, builder, signature, args: context.get_constant(types.intp, count)


@intrinsic
def starts_of(typing: Any, rows: Any, size: Any) -> Any:
    """Return where these rows start, of `size` numbers each."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        starts = [builder.mul(row, args[1]) for row in parts_of(builder, args[0])]
        return tuple_of(starts, context, builder, signature)

    return rows(rows, types.intp), generate


@intrinsic
def places_of(typing: Any, places: Any, t: Any, rows: Any) -> Any:
    """Return the places t, t + 1, ... as many as make 16 pairs with the rows."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        steps = [builder.add(args[1], ir.Constant(args[1].type, i)) for i in range(len(signature.return_type))]
        return tuple_of([builder.load(builder.gep(args[0], [i])) for i in steps], context, builder, signature)

    return types.UniTuple(types.int64, WIDTH // len(rows))(places, types.intp, rows), generate


@intrinsic
def products_at(typing: Any, a: Any, starts_a: Any, b: Any, starts_b: Any, i: Any) -> Any:
    """One number of each row of a, times that of each row of b. Lane k * len(starts_b) + r is of row k and row r."""
    read = reader(lambda of_type: of_type)

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
