"""What a kernel does with the sixteen numbers of a vector: exp, minus, the largest, lanes that belong to rows.

Lane k * rows + r of a vector of scores is of key k and row r: see attention.py.
"""

from typing import Any

from llvmlite import ir
from numba import njit, types
from numba.core.cgutils import get_or_insert_function
from numba.core.extending import intrinsic

from .blocks import WORDS, parts_of, shuffled, sum_2, tuple_of
from .exp import LN_2_HIGH, LN_2_LOW, LOG2_E, LOWEST
from .vectors import (
    FLOATS,
    OPTIONS,
    WIDTH,
    WORD,
    Memory,
    constant,
    fma,
    halved,
    maximum,
    multiply,
    splat,
    vector,
)


@intrinsic
def spread(typing: Any, memory: Any, places: Any) -> Any:
    """Return a vector with memory[places[i]] in each lane of row i: the lanes i, i + len(places), ..."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        numbers = [builder.load(builder.gep(args[0], [place])) for place in parts_of(builder, args[1])]
        whole = ir.Constant(FLOATS, ir.Undefined)
        for i, number in enumerate(numbers):
            whole = builder.insert_element(whole, number, WORD(i))
        return shuffled(builder, whole, whole, [i % len(numbers) for i in range(WIDTH)])

    return vector(memory, places), generate


def folding(combine: Any) -> Any:
    """Code that combines the lanes of each row; all of them have it then."""

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
    """Return a vector of each row: its lane, 16 times."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        lanes = [shuffled(builder, args[0], args[0], [row] * WIDTH) for row in range(len(signature.args[1]))]
        return tuple_of(lanes, context, builder, signature)

    return types.UniTuple(vector, len(rows))(vector, rows), generate


@intrinsic
def write_rows(typing: Any, memory: Any, places: Any, numbers: Any) -> Any:
    """Write what spread() reads: memory[places[i]] = the lane of row i."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        for i, place in enumerate(parts_of(builder, args[1])):
            builder.store(builder.extract_element(args[2], WORD(i)), builder.gep(args[0], [place]))
        return context.get_dummy_value()

    return types.void(memory, places, vector), generate


@intrinsic
def where_below(typing: Any, a: Any, b: Any, numbers: Any, others: Any) -> Any:
    """`numbers` where a < b, else `others`."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.select(builder.fcmp_ordered("<", args[0], args[1]), args[2], args[3])

    return vector(vector, vector, vector, vector), generate


@intrinsic
def floor(typing: Any, numbers: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = ir.FunctionType(FLOATS, [FLOATS])
        return builder.call(get_or_insert_function(builder.module, kind, "llvm.floor.v16f32"), args)

    return vector(vector), generate


@intrinsic
def power_of_2(typing: Any, numbers: Any) -> Any:
    """2 ** each of these whole numbers, -126 .. 127"""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        exponent = builder.add(builder.fptosi(args[0], WORDS), constant(WORDS, 127))
        return builder.bitcast(builder.shl(exponent, constant(WORDS, 23)), FLOATS)

    return vector(vector), generate


@njit(**OPTIONS)
def exp_of(x: Memory) -> Any:
    """exp of each of 16 numbers up to 88; below -87 they count as -87. See exp.py."""
    x = maximum(x, splat(LOWEST))
    k = floor(fma(x, splat(LOG2_E), splat(0.5)))
    r = fma(k, splat(-LN_2_LOW), fma(k, splat(-LN_2_HIGH), x))
    p = splat(1 / 720)
    p = fma(p, r, splat(1 / 120))
    p = fma(p, r, splat(1 / 24))
    p = fma(p, r, splat(1 / 6))
    p = fma(p, r, splat(0.5))
    p = fma(p, r, splat(1))
    p = fma(p, r, splat(1))
    return multiply(p, power_of_2(k))


@intrinsic
def limits(typing: Any, rows: Any, group: Any, before: Any, count: Any) -> Any:
    """Key t + k is seen by row r if t is below lane k * len(rows) + r: below count - k, and before + r // group - k."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        seen = [builder.add(args[2], builder.sdiv(row, args[1])) for row in parts_of(builder, args[0])]
        seen = [builder.select(builder.icmp_signed("<", x, args[3]), x, args[3]) for x in seen]
        whole = ir.Constant(FLOATS, ir.Undefined)
        for lane in range(WIDTH):
            number = builder.sub(seen[lane % len(seen)], ir.Constant(args[2].type, lane // len(seen)))
            whole = builder.insert_element(whole, builder.sitofp(number, FLOATS.element), WORD(lane))
        return whole

    return vector(rows, types.intp, types.intp, types.intp), generate


@intrinsic
def negative(typing: Any, numbers: Any) -> Any:
    return vector(vector), lambda context, builder, signature, args: builder.fneg(args[0])


@intrinsic
def divide(typing: Any, a: Any, b: Any) -> Any:
    return vector(vector, vector), lambda context, builder, signature, args: builder.fdiv(*args)


def larger_or_nan(builder: Any, a: Any, b: Any) -> Any:
    is_a = builder.or_(builder.fcmp_ordered(">", a, b), builder.fcmp_unordered("uno", a, a))
    return builder.select(is_a, a, b)


@intrinsic
def maximum_or_nan(typing: Any, a: Any, b: Any) -> Any:
    """Return the larger of each two; NaN, if one of them is."""
    return vector(vector, vector), lambda context, builder, signature, args: larger_or_nan(builder, *args)


@intrinsic
def largest_or_nan(typing: Any, numbers: Any) -> Any:
    return types.float32(vector), halved(larger_or_nan)


@intrinsic
def lane_numbers(typing: Any) -> Any:
    """0, 1, ... 15"""
    return vector(), lambda context, builder, signature, args: ir.Constant(FLOATS, [float(i) for i in range(WIDTH)])
