"""Sixteen numbers at a time: how a kernel reads and writes what is stored in float32, bfloat16 or float16.

A kernel computes in float32, whatever is stored:

    total = zeros()
    for i in range(0, n, WIDTH):
        total = fma(load(weights, i), load(x, i), total)
    dot = sum_of(total)

A compiler turns a loop over single numbers into one over vectors where it can prove that it may; here it is said. LLVM
takes a vector of 16 to whatever the processor has: one register of AVX-512, two of AVX2, four of NEON.

Memory is addressed as in C: a pointer to the first element, and how far behind it. at(memory, i) is a pointer, too.
Numba has neither bfloat16 nor float16: pointers to uint16 and to int16 stand for them.
"""

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core.extending import intrinsic, models, register_model

WIDTH = 16
Memory = Any  # in a signature: a pointer to float32 or int64 numbers, or to what a model stores
# How functions are compiled. ENTRY: those that Python calls. Sums may be taken in any order; NaN and infinity stay.
# OPTIONS: those that kernels call; without what Python and C need to call them they compile in half of the time.
ENTRY: dict[str, Any] = {"fastmath": {"reassoc", "contract", "nsz", "arcp"}, "error_model": "numpy", "nogil": True}
OPTIONS: dict[str, Any] = ENTRY | {"no_cpython_wrapper": True, "no_cfunc_wrapper": True}
FUSED = ("reassoc", "contract", "nsz")

FLOAT, WORD, HALF, BITS = ir.FloatType(), ir.IntType(32), ir.HalfType(), ir.IntType(16)
FLOATS = ir.VectorType(FLOAT, WIDTH)


class Vector(types.Type):
    """16 float32 numbers."""

    def __init__(self) -> None:
        super().__init__("float32 x 16")


vector = Vector()


@register_model(Vector)
class VectorModel(models.PrimitiveModel):
    def __init__(self, manager: Any, fe_type: types.Type) -> None:
        super().__init__(manager, fe_type, FLOATS)


def element(context: Any, builder: Any, pointer: Any, i: Any, of_type: ir.Type) -> Any:
    """Return a pointer to element i, to read it or to write it as `of_type`."""
    return builder.bitcast(builder.gep(pointer, [i]), of_type.as_pointer())


def reader(many: Callable[[ir.Type], ir.Type]) -> Callable[..., Any]:
    """Code for `many` numbers of whatever type the array stores, as float32."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = signature.args[0].dtype
        if kind == types.float32:
            return builder.load(element(context, builder, *args, many(FLOAT)), align=4)
        if kind == types.int16:
            return builder.fpext(builder.load(element(context, builder, *args, many(HALF)), align=2), many(FLOAT))
        bits = builder.load(element(context, builder, *args, many(BITS)), align=2)
        upper = builder.shl(builder.zext(bits, many(WORD)), constant(many(WORD), 16))
        return builder.bitcast(upper, many(FLOAT))

    return generate


def writer(many: Callable[[ir.Type], ir.Type]) -> Callable[..., Any]:
    """Code that writes `many` float32 numbers as what the array stores."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        memory, i, numbers = args
        value = rounded(builder, signature.args[0].dtype, numbers, many)
        builder.store(value, element(context, builder, memory, i, value.type), align=2)
        return context.get_dummy_value()

    return generate


def rounded(builder: Any, kind: types.Type, numbers: Any, many: Callable[[ir.Type], ir.Type]) -> Any:
    """float32 numbers as they are stored: the nearest there is, and of two the even one."""
    if kind == types.float32:
        return numbers
    if kind == types.int16:
        return builder.fptrunc(numbers, many(HALF))
    bits = builder.bitcast(numbers, many(WORD))
    odd = builder.and_(builder.lshr(bits, constant(many(WORD), 16)), constant(many(WORD), 1))
    result = builder.add(bits, builder.add(odd, constant(many(WORD), 0x7FFF)))
    is_nan = builder.fcmp_unordered("uno", numbers, numbers)  # rounding could turn it into infinity
    result = builder.select(is_nan, constant(many(WORD), 0x7FC00000), result)
    return builder.trunc(builder.lshr(result, constant(many(WORD), 16)), many(BITS))


def one(of_type: ir.Type) -> ir.Type:
    return of_type


def sixteen(of_type: ir.Type) -> ir.Type:
    return ir.VectorType(of_type, WIDTH)


def constant(of_type: ir.Type, value: int) -> ir.Constant:
    return ir.Constant(of_type, [value] * WIDTH if isinstance(of_type, ir.VectorType) else value)


@intrinsic
def read(typing: Any, memory: Any, i: Any) -> Any:
    """Return the element i."""
    return types.float32(memory, types.intp), reader(one)


@intrinsic
def load(typing: Any, memory: Any, i: Any) -> Any:
    """Return the elements i .. i + 15."""
    return vector(memory, types.intp), reader(sixteen)


@intrinsic
def write(typing: Any, memory: Any, i: Any, number: Any) -> Any:
    """memory[i] = number"""
    return types.void(memory, types.intp, types.float32), writer(one)


@intrinsic
def store(typing: Any, memory: Any, i: Any, numbers: Any) -> Any:
    """memory[i .. i + 15] = numbers"""
    return types.void(memory, types.intp, vector), writer(sixteen)


@intrinsic
def splat(typing: Any, number: Any) -> Any:
    """One number, 16 times."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        nothing = ir.Constant(FLOATS, ir.Undefined)
        first = builder.insert_element(nothing, args[0], WORD(0))
        return builder.shuffle_vector(first, nothing, constant(sixteen(WORD), 0))

    return vector(types.float32), generate


@intrinsic
def zeros(typing: Any) -> Any:
    return vector(), lambda context, builder, signature, args: constant(FLOATS, 0)


@intrinsic
def fma(typing: Any, a: Any, b: Any, c: Any) -> Any:
    """Return a * b + c."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.fadd(builder.fmul(args[0], args[1], flags=FUSED), args[2], flags=FUSED)

    return vector(vector, vector, vector), generate


@intrinsic
def multiply(typing: Any, a: Any, b: Any) -> Any:
    return vector(vector, vector), lambda context, builder, signature, args: builder.fmul(*args, flags=FUSED)


@intrinsic
def add(typing: Any, a: Any, b: Any) -> Any:
    return vector(vector, vector), lambda context, builder, signature, args: builder.fadd(*args, flags=FUSED)


@intrinsic
def maximum(typing: Any, a: Any, b: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.select(builder.fcmp_ordered(">", *args), *args)

    return vector(vector, vector), generate


def halved(combine: Callable[[Any, Any, Any], Any]) -> Callable[..., Any]:
    """Code that makes one number of 16: half of them with the other half, four times."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        numbers, distance = args[0], WIDTH
        while distance := distance // 2:
            moved = ir.Constant(sixteen(WORD), [(i + distance) % WIDTH for i in range(WIDTH)])
            numbers = combine(builder, numbers, builder.shuffle_vector(numbers, numbers, moved))
        return builder.extract_element(numbers, WORD(0))

    return generate


@intrinsic
def sum_of(typing: Any, numbers: Any) -> Any:
    return types.float32(vector), halved(lambda builder, a, b: builder.fadd(a, b, flags=FUSED))


@intrinsic
def largest_of(typing: Any, numbers: Any) -> Any:
    return types.float32(vector), halved(lambda builder, a, b: builder.select(builder.fcmp_ordered(">", a, b), a, b))


def pointer_to(dtype: types.Type) -> Callable[..., Any]:
    @intrinsic
    def pointer(typing: Any, address: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return builder.inttoptr(args[0], context.get_value_type(signature.return_type))

        return types.CPointer(dtype)(types.int64), generate

    return pointer


floats = pointer_to(types.float32)  # the float32 numbers at an address
integers = pointer_to(types.int64)


@intrinsic
def stored(typing: Any, address: Any, like: Any) -> Any:
    """Return the memory at an address, of the type of `like`."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], context.get_value_type(signature.return_type))

    return types.CPointer(like.dtype)(types.int64, like), generate


@intrinsic
def at(typing: Any, memory: Any, i: Any) -> Any:
    """Return the memory from element i on."""
    return memory(memory, types.intp), lambda context, builder, signature, args: builder.gep(args[0], [args[1]])


@intrinsic
def get(typing: Any, memory: Any, i: Any) -> Any:
    """Element i of integers."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load(builder.gep(args[0], [args[1]]))

    return types.int64(memory, types.intp), generate


@intrinsic
def put(typing: Any, memory: Any, i: Any, value: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.store(args[2], builder.gep(args[0], [args[1]]))
        return context.get_dummy_value()

    return types.void(memory, types.intp, types.int64), generate
