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
    """Whether this processor has it, and Numba compiles for this processor."""
    if os.environ.get("NUMBA_CPU_NAME") or os.environ.get("NUMBA_CPU_FEATURES"):
        return False
    return bool(binding.get_host_cpu_features().get("avx512bf16"))


def are_pairs(a: Any, b: Any) -> bool:
    return a.dtype == b.dtype == types.uint16 and has_dot_of_pairs()


@intrinsic
def depth_of(typing: Any, a: Any, b: Any) -> Any:
    """How many numbers of a row of x add_outer() takes: 2 or 1."""
    count = 2 if are_pairs(a, b) else 1
    return types.intp(a, b), lambda context, builder, signature, args: context.get_constant(types.intp, count)


@intrinsic
def add_outer(typing: Any, sums: Any, x: Any, rows: Any, k: Any, weight: Any, columns: Any, i: Any) -> Any:
    """sums[r, c] + x[rows[r] + k] * weight[columns[c] + i ..], 16 numbers of the weight; two of each if they are pairs.

    rows, columns: where they start
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind_x, kind_weight = signature.args[1], signature.args[4]
        use = pair_up if are_pairs(kind_x, kind_weight) else widen
        before = iter(parts_of(builder, args[0]))
        at_x = [builder.add(row, args[3]) for row in parts_of(builder, args[2])]
        at_weight = [builder.add(column, args[6]) for column in parts_of(builder, args[5])]
        numbers, vectors, product = use(context, builder, (kind_x, args[1], at_x), (kind_weight, args[4], at_weight))
        values = [product(builder, next(before), splatted(builder, x), y) for x in numbers for y in vectors]
        return tuple_of(values, context, builder, signature)

    return sums(sums, x, rows, types.intp, weight, columns, types.intp), generate


def splatted(builder: Any, number: Any) -> Any:
    """A number of 32 bits, 16 times."""
    many = ir.VectorType(number.type, WIDTH)
    first = builder.insert_element(ir.Constant(many, ir.Undefined), number, WORD(0))
    return builder.shuffle_vector(first, first, constant(WORDS, 0))


def widen(context: Any, builder: Any, x: Any, weight: Any) -> Any:
    def read(many: Any, kind: Any, memory: Any, places: list[Any]) -> list[Any]:
        signature = types.float32(kind, types.intp)
        return [reader(many)(context, builder, signature, (memory, place)) for place in places]

    def product(builder: Any, total: Any, x: Any, y: Any) -> Any:
        return sum_2(builder, builder.fmul(x, y, flags=FUSED), total)

    return read(one, *x), read(sixteen, *weight), product


def pair_up(context: Any, builder: Any, x: Any, weight: Any) -> Any:
    def words(of_type: ir.Type, _: Any, memory: Any, places: list[Any]) -> list[Any]:
        return [builder.load(element(context, builder, memory, place, of_type), align=2) for place in places]

    def product(builder: Any, total: Any, x: Any, y: Any) -> Any:
        kind = ir.FunctionType(FLOATS, [FLOATS, PAIRS, PAIRS])
        dot = builder.module.declare_intrinsic(DOT_OF_PAIRS, (), kind)
        return builder.call(dot, [total, builder.bitcast(x, PAIRS), builder.bitcast(y, PAIRS)])

    return words(WORD, *x), words(WORDS, *weight), product
