"""Dot products of rows in memory: the inner loop of queries times keys, and of weights that are not packed.

Several rows of one matrix are multiplied by several rows of another in registers. Reading a row of a weight from memory
is expensive, so each read serves up to four rows of x.

A processor with AVX-512 BF16 multiplies 32 bfloat16 numbers by 32 others in one instruction, and adds the products in
pairs to 16 float32 sums without widening anything first. On other processors, 16 numbers are widened to float32
and multiplied.
"""

import os
from typing import Any

from llvmlite import binding, ir
from numba import types

from .blocks import no_sums, parts_of, products_at, shuffled, spread, starts_of, sums_of, tuple_of, write_rows
from .vectors import (
    BITS,
    FLOATS,
    FUSED,
    WIDTH,
    WORD,
    WORDS,
    Memory,
    add,
    constant,
    element,
    intrinsic,
    kernel,
    one,
    reader,
    rounded,
    sixteen,
    splat,
    sum_2,
    vector,
)


class BFloat(ir.Type):
    """LLVM's bfloat type, which llvmlite does not define."""

    def _to_string(self) -> str:
        return "bfloat"


PAIRS = ir.VectorType(BFloat(), 2 * WIDTH)
DOT_OF_PAIRS = "llvm.x86.avx512bf16.dpbf16ps.512"


def has_dot_of_pairs() -> bool:
    """Return whether this processor has AVX-512 BF16, and Numba compiles for this processor."""
    if os.environ.get("NUMBA_CPU_NAME") or os.environ.get("NUMBA_CPU_FEATURES"):
        return False
    return bool(binding.get_host_cpu_features().get("avx512bf16"))


def are_pairs(a: Any, b: Any) -> bool:
    """Return whether rows of a and b are multiplied as pairs of bfloat16."""
    return a.dtype == b.dtype == types.uint16 and has_dot_of_pairs()


def count_of(of_pairs: int, of_others: int) -> Any:
    """Return an intrinsic that chooses between two constants by are_pairs(a, b)."""

    @intrinsic(lambda a, b: types.intp(a, b))
    def count(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        number = of_pairs if are_pairs(*signature.args) else of_others
        return context.get_constant(types.intp, number)

    return count


step_of = count_of(2 * WIDTH, WIDTH)  # numbers of a row that add_products() multiplies at a time
depth_of = count_of(2, 1)  # numbers of a row of x that add_outer() multiplies at a time


@intrinsic(lambda sums, a, rows_a, b, rows_b, i: sums(sums, a, rows_a, b, rows_b, types.intp))
def add_products(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    """Return sums[k, r] + a[rows_a[k] + i ..] * b[rows_b[r] + i ..] for the next step_of(a, b) numbers of each row.

    `rows_a` and `rows_b` are start positions.
    """
    use = Pairs if are_pairs(signature.args[1], signature.args[3]) else Widened
    left = use.vectors(context, builder, signature.args[1], args[1], moved(builder, args[2], args[5]))
    right = use.vectors(context, builder, signature.args[3], args[3], moved(builder, args[4], args[5]))
    return multiply_all(use, left, right, context, builder, signature, args[0])


@intrinsic(lambda sums, x, rows, k, weight, columns, i: sums(sums, x, rows, types.intp, weight, columns, types.intp))
def add_outer(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    """Return sums[r, c] + x[rows[r] + k] * weight[columns[c] + i ..], for 16 numbers of the weight or 16 pairs.

    `rows` and `columns` are start positions.
    """
    use = Pairs if are_pairs(signature.args[1], signature.args[4]) else Widened
    left = use.splats(context, builder, signature.args[1], args[1], moved(builder, args[2], args[3]))
    right = use.vectors(context, builder, signature.args[4], args[4], moved(builder, args[5], args[6]))
    return multiply_all(use, left, right, context, builder, signature, args[0])


@intrinsic(lambda memory, values, i, rows, numbers: types.void(memory, values, types.intp, rows, vector))
def store_weights(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    """Store 16 weights for add_weighted(). Lane k * len(rows) + r belongs to key k and row r.

    With pairs, the weights of two keys are side by side: for row 0, row 1, ...; then those of the next two keys.
    """
    (memory, _, i, rows, numbers), dtype = args, signature.args[0].dtype
    if are_pairs(signature.args[0], signature.args[1]):
        count = len(rows.type)
        lanes = [
            (2 * k + each) * count + r for k in range(WIDTH // 2 // count) for r in range(count) for each in (0, 1)
        ]
        numbers = shuffled(builder, numbers, numbers, lanes)
    value = rounded(builder, dtype, numbers, sixteen)
    builder.store(value, element(context, builder, memory, i, value.type), align=2)
    return context.get_dummy_value()


@intrinsic(lambda sums, weights, rows, i, values, columns, a, b: sums(
    sums, weights, rows, types.intp, values, columns, types.intp, types.intp
))  # fmt: skip
def add_weighted(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    """Return sums[r, c] + the weight of row r * the value at `a`, for 16 numbers from each column c.

    With pairs, also add the weight of the next key * the value at `b`. The weights of these keys start at i.
    """
    sums, weights, rows, i, values, columns, a, b = args
    of_weights, of_values = signature.args[1], signature.args[4]
    depth = 2 if are_pairs(of_weights, of_values) else 1
    use = Pairs if depth == 2 else Widened
    places = [builder.add(i, ir.Constant(i.type, depth * row)) for row in range(len(rows.type))]
    left = use.splats(context, builder, of_weights, weights, places)
    right = use.columns(context, builder, of_values, values, moved(builder, columns, a), moved(builder, columns, b))
    return multiply_all(use, left, right, context, builder, signature, sums)


def moved(builder: Any, starts: Any, distance: Any) -> list[Any]:
    """Return the start positions, each moved by `distance`."""
    return [builder.add(start, distance) for start in parts_of(builder, starts)]


def multiply_all(
    use: Any, left: list[Any], right: list[Any], context: Any, builder: Any, signature: Any, sums: Any
) -> Any:
    """Generate the code that adds the product of each left and each right vector to its sum."""
    before = iter(parts_of(builder, sums))
    values = [use.add_product(builder, next(before), x, y) for x in left for y in right]
    return tuple_of(values, context, builder, signature)


def splatted(builder: Any, number: Any) -> Any:
    """Return a vector of 16 copies of a 32-bit number."""
    first = builder.insert_element(ir.Constant(ir.VectorType(number.type, WIDTH), ir.Undefined), number, WORD(0))
    return builder.shuffle_vector(first, first, constant(WORDS, 0))


class Widened:
    """Generators of code that loads 16 numbers of any type, and multiplies them as float32."""

    @staticmethod
    def vectors(context: Any, builder: Any, dtype: Any, memory: Any, places: list[Any]) -> list[Any]:
        signature = types.float32(dtype, types.intp)
        return [reader(sixteen)(context, builder, signature, (memory, place)) for place in places]

    @staticmethod
    def columns(context: Any, builder: Any, dtype: Any, memory: Any, a: list[Any], b: list[Any]) -> list[Any]:
        return Widened.vectors(context, builder, dtype, memory, a)

    @staticmethod
    def splats(context: Any, builder: Any, dtype: Any, memory: Any, places: list[Any]) -> list[Any]:
        signature = types.float32(dtype, types.intp)
        return [splatted(builder, reader(one)(context, builder, signature, (memory, place))) for place in places]

    @staticmethod
    def add_product(builder: Any, total: Any, x: Any, y: Any) -> Any:
        return sum_2(builder, builder.fmul(x, y, flags=FUSED), total)


class Pairs:
    """Generators of code that loads 16 pairs of bfloat16 numbers, and multiplies them without widening."""

    @staticmethod
    def vectors(context: Any, builder: Any, dtype: Any, memory: Any, places: list[Any]) -> list[Any]:
        return [builder.load(element(context, builder, memory, place, WORDS), align=2) for place in places]

    @staticmethod
    def columns(context: Any, builder: Any, dtype: Any, memory: Any, a: list[Any], b: list[Any]) -> list[Any]:
        """Return 16 pairs for each column: a number of the row at `a`, and a number of the row at `b`."""
        lanes = ir.Constant(ir.VectorType(WORD, 2 * WIDTH), [lane // 2 + lane % 2 * WIDTH for lane in range(2 * WIDTH)])
        few = ir.VectorType(BITS, WIDTH)
        rows = [[builder.load(element(context, builder, memory, i, few), align=2) for i in each] for each in (a, b)]
        both = [builder.shuffle_vector(x, y, lanes) for x, y in zip(*rows, strict=True)]
        return [builder.bitcast(pairs, WORDS) for pairs in both]

    @staticmethod
    def splats(context: Any, builder: Any, dtype: Any, memory: Any, places: list[Any]) -> list[Any]:
        words = [builder.load(element(context, builder, memory, place, WORD), align=2) for place in places]
        return [splatted(builder, word) for word in words]

    @staticmethod
    def add_product(builder: Any, total: Any, x: Any, y: Any) -> Any:
        function_type = ir.FunctionType(FLOATS, [FLOATS, PAIRS, PAIRS])
        dot = builder.module.declare_intrinsic(DOT_OF_PAIRS, (), function_type)
        return builder.call(dot, [total, builder.bitcast(x, PAIRS), builder.bitcast(y, PAIRS)])


@kernel
def dots(a: Memory, rows_a: tuple[int, ...], b: Memory, rows_b: tuple[int, ...], size: int) -> Any:
    """Return a vector whose lane k * len(rows_b) + r is the dot product of row k of a and row r of b.

    `rows_a` and `rows_b` are start positions of rows of `size` numbers, and make at most 16 pairs.
    """
    sums, more, each, i = no_sums(rows_a, rows_b), no_sums(rows_a, rows_b), step_of(a, b), 0
    if len(sums) <= 4:  # two sums for each pair of rows, because an addition waits for the one before it
        while i + 2 * each <= size:
            sums = add_products(sums, a, rows_a, b, rows_b, i)
            more = add_products(more, a, rows_a, b, rows_b, i + each)
            i += 2 * each
    while i + each <= size:
        sums = add_products(sums, a, rows_a, b, rows_b, i)
        i += each
    result = add(sums_of(sums), sums_of(more)) if len(sums) <= 4 else sums_of(sums)
    while i < size:
        result = add(result, products_at(a, rows_a, b, rows_b, i))
        i += 1
    return result


@kernel
def dot_rows(row: Memory, x: Memory, size: int, rows: int, bias: float, out: Memory, stride: int, adds: bool) -> None:
    """Set out[m * stride] to `bias` plus the dot product of `row` and x[m], for at most 4 rows m.

    row [size]; x [rows, size]; out [rows, stride]. With `adds`, add to `out` instead.
    """
    if rows == 1:
        write_dots(row, x, (0,), size, bias, out, stride, adds)
    elif rows == 2:
        write_dots(row, x, (0, 1), size, bias, out, stride, adds)
    else:  # three rows are computed as four, with the last one twice
        write_dots(row, x, (0, 1, 2, rows - 1), size, bias, out, stride, adds)


@kernel
def write_dots(
    row: Memory, x: Memory, rows: tuple[int, ...], size: int, bias: float, out: Memory, stride: int, adds: bool
) -> None:
    to, numbers = starts_of(rows, stride), add(dots(row, (0,), x, starts_of(rows, size), size), splat(bias))
    write_rows(out, to, add(numbers, spread(out, to)) if adds else numbers)
