"""Products of stored numbers, as many at a time as the processor takes.

A processor with AVX-512 BF16 multiplies 32 bfloat16 numbers by 32 others, and adds the products, two at a time, to 16
float32 sums: one instruction, and nothing is widened. Else 16 numbers are widened to float32, and then multiplied.
"""

import os
from typing import Any

from llvmlite import binding, ir
from numba import types
from numba.core.extending import intrinsic

from .blocks import WORDS, parts_of, sum_2, tuple_of
from .vectors import FLOATS, FUSED, WIDTH, WORD, constant, element, one, reader, sixteen


class BFloat(ir.Type):
    """LLVM's bfloat, which llvmlite has no name for."""

    def _to_string(self) -> str:
        return "bfloat"


PAIRS = ir.VectorType(BFloat(), 2 * WIDTH)
DOT_OF_PAIRS = "llvm.x86.avx512bf16.dpbf16ps.512"


def has_dot_of_pairs() -> bool:
    """Return whether this processor has it, and Numba compiles for this processor."""
    if os.environ.get("NUMBA_CPU_NAME") or os.environ.get("NUMBA_CPU_FEATURES"):
        return False
    return bool(binding.get_host_cpu_features().get("avx512bf16"))


def are_pairs(a: Any, b: Any) -> bool:
    return a.dtype == b.dtype == types.uint16 and has_dot_of_pairs()


def count_of(of_pairs: int, of_others: int) -> Any:
    @intrinsic
    def count(typing: Any, a: Any, b: Any) -> Any:
        number = of_pairs if are_pairs(a, b) else of_others
        return types.intp(a, b), lambda context, builder, signature, args: context.get_constant(types.intp, number)

    return count


step_of = count_of(2 * WIDTH, WIDTH)  # so many numbers of a row add_products() takes
depth_of = count_of(2, 1)  # so many numbers of a row of x add_outer() takes


@intrinsic
def add_products(typing: Any, sums: Any, a: Any, rows_a: Any, b: Any, rows_b: Any, i: Any) -> Any:
    """sums[k, r] + a[rows_a[k] + i ..] * b[rows_b[r] + i ..]: the next step_of(a, b) numbers of each row meet.

    rows_a, rows_b: where they start
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        use = Pairs if are_pairs(signature.args[1], signature.args[3]) else Widened
        left = use.vectors(context, builder, signature.args[1], args[1], moved(builder, args[2], args[5]))
        right = use.vectors(context, builder, signature.args[3], args[3], moved(builder, args[4], args[5]))
        return products(use, left, right, context, builder, signature, args[0])

    return sums(sums, a, rows_a, b, rows_b, types.intp), generate


@intrinsic
def add_outer(typing: Any, sums: Any, x: Any, rows: Any, k: Any, weight: Any, columns: Any, i: Any) -> Any:
    """sums[r, c] + x[rows[r] + k] * weight[columns[c] + i ..], 16 numbers of the weight; two of each if they are pairs.

    rows, columns: where they start
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        use = Pairs if are_pairs(signature.args[1], signature.args[4]) else Widened
        left = use.splats(context, builder, signature.args[1], args[1], moved(builder, args[2], args[3]))
        right = use.vectors(context, builder, signature.args[4], args[4], moved(builder, args[5], args[6]))
        return products(use, left, right, context, builder, signature, args[0])

    return sums(sums, x, rows, types.intp, weight, columns, types.intp), generate


def moved(builder: Any, starts: Any, distance: Any) -> list[Any]:
    return [builder.add(start, distance) for start in parts_of(builder, starts)]


def products(use: Any, left: list, right: list, context: Any, builder: Any, signature: Any, sums: Any) -> Any:
    before = iter(parts_of(builder, sums))
    values = [use.add_product(builder, next(before), x, y) for x in left for y in right]
    return tuple_of(values, context, builder, signature)


def splatted(builder: Any, number: Any) -> Any:
    """Return a number of 32 bits, 16 times."""
    first = builder.insert_element(ir.Constant(ir.VectorType(number.type, WIDTH), ir.Undefined), number, WORD(0))
    return builder.shuffle_vector(first, first, constant(WORDS, 0))


class Widened:
    """16 numbers of any type, as float32."""

    @staticmethod
    def vectors(context: Any, builder: Any, kind: Any, memory: Any, places: list[Any]) -> list[Any]:
        signature = types.float32(kind, types.intp)
        return [reader(sixteen)(context, builder, signature, (memory, place)) for place in places]

    @staticmethod
    def splats(context: Any, builder: Any, kind: Any, memory: Any, places: list[Any]) -> list[Any]:
        signature = types.float32(kind, types.intp)
        return [splatted(builder, reader(one)(context, builder, signature, (memory, place))) for place in places]

    @staticmethod
    def add_product(builder: Any, total: Any, x: Any, y: Any) -> Any:
        return sum_2(builder, builder.fmul(x, y, flags=FUSED), total)


class Pairs:
    """32 numbers, as they are stored."""

    @staticmethod
    def vectors(context: Any, builder: Any, kind: Any, memory: Any, places: list[Any]) -> list[Any]:
        return [builder.load(element(context, builder, memory, place, WORDS), align=2) for place in places]

    @staticmethod
    def splats(context: Any, builder: Any, kind: Any, memory: Any, places: list[Any]) -> list[Any]:
        words = [builder.load(element(context, builder, memory, place, WORD), align=2) for place in places]
        return [splatted(builder, word) for word in words]

    @staticmethod
    def add_product(builder: Any, total: Any, x: Any, y: Any) -> Any:
        kind = ir.FunctionType(FLOATS, [FLOATS, PAIRS, PAIRS])
        dot = builder.module.declare_intrinsic(DOT_OF_PAIRS, (), kind)
        return builder.call(dot, [total, builder.bitcast(x, PAIRS), builder.bitcast(y, PAIRS)])
