"""Dot products of rows in memory: the inner loop of queries times keys, and of weights that are not packed.

Several rows of one matrix are multiplied by several rows of another in registers. Reading a row of a weight from memory
is expensive, so each read serves up to four rows of x.

A processor with AVX-512 BF16 multiplies 32 bfloat16 numbers by 32 others in one instruction, and adds the products in
pairs to 16 float32 sums without widening anything first. On other processors, 16 numbers are widened to float32
and multiplied.
"""

from typing import Any

from llvmlite import ir
from numba import types

from .blocks import moved, no_sums, parts_of, products_at, spread, starts_of, sums_of, tuple_of, turned, write_rows
from .layout import WIDTH, has_dot_of_pairs
from .vectors import (
    BITS,
    FLOATS,
    WORD,
    WORDS,
    Memory,
    add,
    constant,
    element,
    fused,
    intrinsic,
    kernel,
    one,
    reader,
    sixteen,
    splat,
)


class BFloat(ir.Type):
    """LLVM's bfloat type, which llvmlite does not define."""

    def _to_string(self) -> str:
        return "bfloat"


PAIRS = ir.VectorType(BFloat(), 2 * WIDTH)
DOT_OF_PAIRS = "llvm.x86.avx512bf16.dpbf16ps.512"


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


@intrinsic(lambda sums, weights, rows, i, values, columns, a, b: sums(
    sums, weights, rows, types.intp, values, columns, types.intp, types.intp
))  # fmt: skip
def add_weighted(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    """Return sums[r, c] + the weight of row r * the value at `a`, for 16 numbers from each column c.

    With pairs, also add the weight of the next key * the value at `b`. The weights of row r start at rows[r] + i.
    """
    sums, weights, rows, i, values, columns, a, b = args
    of_weights, of_values = signature.args[1], signature.args[4]
    use = Pairs if are_pairs(of_weights, of_values) else Widened
    left = use.splats(context, builder, of_weights, weights, moved(builder, rows, i))
    right = use.columns(context, builder, of_values, values, moved(builder, columns, a), moved(builder, columns, b))
    return multiply_all(use, left, right, context, builder, signature, sums)


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
        return fused(builder, x, y, total)


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
    """Return a vector whose lane r * len(rows_a) + k is the dot product of row k of a and row r of b.

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
    sums, more = turned(sums, rows_a), turned(more, rows_a)
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
