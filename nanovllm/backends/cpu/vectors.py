"""The building blocks of kernels: vectors of sixteen numbers, stored as float32, bfloat16 or float16.

Kernels compute in float32, whatever the storage type:

    total = zeros()
    for i in range(0, n, WIDTH):
        total = fma(load(weights, i), load(x, i), total)
    dot = sum_of(total)

A compiler vectorizes a loop over single numbers only if it can prove that this is safe, so these kernels use vectors
explicitly. LLVM maps a vector of 16 to the processor's registers: one of AVX-512, two of AVX2, or four of NEON.

Memory is addressed as in C, by a pointer to the first element and an index. at(memory, i) points to element i.
Numba has neither bfloat16 nor float16: pointers to uint16 and int16 stand for them (see like_of()).
"""

import inspect
from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar

import numpy as np
import torch
from llvmlite import binding, ir
from numba import njit, types
from numba.core import extending
from numba.core.cgutils import get_or_insert_function
from numba.core.registry import cpu_target

from .layout import WIDTH

Memory = Any  # in a signature: a pointer to float32 or int64 numbers, or to numbers of a model's dtype
Function = TypeVar("Function", bound=Callable[..., Any])
# No fastmath: a token's bits must not depend on the tokens beside it. The code for one row and the code for four are
# compiled separately, and a flag would let the compiler add or fuse in one of them in another way. A product and a sum
# that take one rounding are written as fma().
# Only other kernels call most kernels, and only the loader calls the step: none needs the wrappers for Python and C.
OPTIONS: dict[str, Any] = {"error_model": "numpy", "no_cpython_wrapper": True, "no_cfunc_wrapper": True}

FLOAT, WORD, HALF, BITS = ir.FloatType(), ir.IntType(32), ir.HalfType(), ir.IntType(16)
FLOATS, WORDS = ir.VectorType(FLOAT, WIDTH), ir.VectorType(WORD, WIDTH)


def kernel(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a function that other kernels or the loader call."""
    compiled: Callable[..., Any] = njit(**OPTIONS)(function)
    return compiled


def part(function: Callable[..., Any]) -> Callable[..., Any]:
    """Make a function a part of the only kernel that calls it, before LLVM sees either.

    LLVM optimizes any other kernel once by itself and again in each of its callers, so fewer levels compile faster.
    """
    compiled: Callable[..., Any] = njit(**OPTIONS, inline="always")(function)
    return compiled


def inlined(function: Callable[..., Any]) -> Callable[..., Any]:
    """Force-inline a function into each kernel that calls it, to keep vectors in registers."""
    compiled: Callable[..., Any] = njit(**OPTIONS, forceinline=True)(function)
    return compiled


def intrinsic(signature: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator that turns a function that generates LLVM code into a function that kernels can call.

    `signature` returns the Numba signature for the types of the arguments. Its parameters name the arguments.
    """

    def decorate(generate: Callable[..., Any]) -> Callable[..., Any]:
        def typed(typing: Any, *args: Any) -> Any:
            return signature(*args), generate

        names = ["typing", *inspect.signature(signature).parameters]
        parameters = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in names]
        setattr(typed, "__signature__", inspect.Signature(parameters))  # noqa: B010  # Numba reads it
        typed.__name__, typed.__doc__ = generate.__name__, generate.__doc__
        function: Callable[..., Any] = extending.intrinsic(typed)
        return function

    return decorate


def choose(example: Callable[..., Any], choice: Callable[[Any], Function]) -> Callable[..., Any]:
    """Return a function for kernels that calls the function choice(type of the first argument).

    All functions that `choice` may return have the signature of `example`. Only the chosen one is compiled.
    """

    def chosen(*args: Any) -> Any:
        raise NotImplementedError("only kernels can call this function")

    def choose_by_type(first: Any, *more: Any) -> Any:
        return choice(first)

    setattr(choose_by_type, "__signature__", inspect.signature(example))  # noqa: B010  # Numba reads it
    extending.overload(chosen, jit_options=OPTIONS, strict=False)(choose_by_type)
    return chosen


def like_of(dtype: torch.dtype) -> np.ndarray:
    """Return an empty array of the type that stands for `dtype` in kernels."""
    return np.empty(0, {torch.float32: np.float32, torch.bfloat16: np.uint16, torch.float16: np.int16}[dtype])


class Vector(types.Type):
    """The Numba type of 16 float32 numbers."""

    def __init__(self) -> None:
        super().__init__("float32 x 16")


vector = Vector()


@extending.register_model(Vector)
class VectorModel(extending.models.PrimitiveModel):
    def __init__(self, manager: Any, fe_type: types.Type) -> None:
        super().__init__(manager, fe_type, FLOATS)


# Loads and stores


def element(context: Any, builder: Any, pointer: Any, i: Any, of_type: ir.Type) -> Any:
    """Return a pointer to element i, cast to `of_type`."""
    return builder.bitcast(builder.gep(pointer, [i]), of_type.as_pointer())


def reader(shape: Callable[[ir.Type], ir.Type]) -> Callable[..., Any]:
    """Return a generator of code that loads `one` number or `sixteen` as float32, from any storage type."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        dtype = signature.args[0].dtype
        if dtype == types.float32:
            return builder.load(element(context, builder, *args, shape(FLOAT)), align=4)
        if dtype == types.int16:
            return from_half(builder, builder.load(element(context, builder, *args, shape(BITS)), align=2))
        bits = builder.load(element(context, builder, *args, shape(BITS)), align=2)
        upper = builder.shl(builder.zext(bits, shape(WORD)), constant(shape(WORD), 16))
        return builder.bitcast(upper, shape(FLOAT))

    return generate


def writer(shape: Callable[[ir.Type], ir.Type]) -> Callable[..., Any]:
    """Return a generator of code that stores `one` float32 number or `sixteen` in the storage type."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        memory, i, numbers = args
        value = rounded(builder, signature.args[0].dtype, numbers, shape)
        builder.store(value, element(context, builder, memory, i, value.type), align=2)
        return context.get_dummy_value()

    return generate


def rounded(builder: Any, dtype: types.Type, numbers: Any, shape: Callable[[ir.Type], ir.Type]) -> Any:
    """Return float32 numbers in the storage type `dtype`, rounded to nearest, ties to even."""
    if dtype == types.float32:
        return numbers
    if dtype == types.int16:
        return builder.fptrunc(numbers, shape(HALF))
    bits = builder.bitcast(numbers, shape(WORD))
    odd = builder.and_(builder.lshr(bits, constant(shape(WORD), 16)), constant(shape(WORD), 1))
    result = builder.add(bits, builder.add(odd, constant(shape(WORD), 0x7FFF)))
    is_nan = builder.fcmp_unordered("uno", numbers, numbers)  # rounding could turn NaN into infinity
    result = builder.select(is_nan, constant(shape(WORD), 0x7FC00000), result)
    return builder.trunc(builder.lshr(result, constant(shape(WORD), 16)), shape(BITS))


def one(of_type: ir.Type) -> ir.Type:
    return of_type


def sixteen(of_type: ir.Type) -> ir.Type:
    return ir.VectorType(of_type, WIDTH)


def constant(of_type: ir.Type, value: float) -> ir.Constant:
    return ir.Constant(of_type, [value] * of_type.count if isinstance(of_type, ir.VectorType) else value)


# Return element i as float32
read = intrinsic(lambda memory, i: types.float32(memory, types.intp))(reader(one))


# Return elements i to i + 15 as a vector
load = intrinsic(lambda memory, i: vector(memory, types.intp))(reader(sixteen))


# Set memory[i] to `number`
write = intrinsic(lambda memory, i, number: types.void(memory, types.intp, types.float32))(writer(one))


# Set memory[i] to memory[i + 15] to `numbers`
store = intrinsic(lambda memory, i, numbers: types.void(memory, types.intp, vector))(writer(sixteen))


@intrinsic(lambda number: vector(types.float32))
def splat(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    """Return a vector of 16 equal numbers."""
    nothing = ir.Constant(FLOATS, ir.Undefined)
    first = builder.insert_element(nothing, args[0], WORD(0))
    return builder.shuffle_vector(first, nothing, constant(sixteen(WORD), 0))


@intrinsic(lambda: vector())
def zeros(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    return constant(FLOATS, 0)


# Arithmetic


@intrinsic(lambda a, b, c: vector(vector, vector, vector))
def fma(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    """Return a * b + c, with one rounding if the processor can."""
    return fused(builder, *args)


@intrinsic(lambda a, b: vector(vector, vector))
def multiply(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    return builder.fmul(*args)


@intrinsic(lambda a, b: vector(vector, vector))
def add(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    return builder.fadd(*args)


@intrinsic(lambda a, b: vector(vector, vector))
def maximum(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    return larger(builder, *args)


@intrinsic(lambda numbers: vector(vector))
def negative(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    return builder.fneg(args[0])


@intrinsic(lambda a, b: vector(vector, vector))
def divide(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    return builder.fdiv(*args)


def fused(builder: Any, a: Any, b: Any, c: Any) -> Any:
    """Generate code for a * b + c in each of 16 lanes."""
    if not has_fma(*cpu_target.target_context.codegen().magic_tuple()):
        return builder.fadd(builder.fmul(a, b), c)
    function_type = ir.FunctionType(FLOATS, [FLOATS] * 3)
    return builder.call(get_or_insert_function(builder.module, function_type, "llvm.fma.v16f32"), [a, b, c])


@cache
def has_fma(triple: str, cpu: str, features: str) -> bool:
    """Return whether a processor multiplies and adds in one instruction: for others, LLVM calls a slow function."""
    text = "declare float @llvm.fma.f32(float, float, float) define float @f(float %a) {"
    text += " %b = call float @llvm.fma.f32(float %a, float %a, float %a) ret float %b }"
    return "fmaf" not in assembly_of(text, triple, cpu, features)


@cache
def has_float16(triple: str, cpu: str, features: str) -> bool:
    """Return whether a processor widens float16 numbers: for others, LLVM calls a function that isn't there."""
    text = "define float @f(half %a) { %b = fpext half %a to float ret float %b }"
    return "hf" not in assembly_of(text, triple, cpu, features)  # __extendhfsf2


def assembly_of(text: str, triple: str, cpu: str, features: str) -> str:
    machine = binding.Target.from_triple(triple).create_target_machine(cpu=cpu, features=features)
    return str(machine.emit_assembly(binding.parse_assembly(text)))


def from_half(builder: Any, bits: Any) -> Any:
    """Generate code that turns the bits of float16 numbers, one or 16, into float32."""
    shape = sixteen if isinstance(bits.type, ir.VectorType) else one
    if has_float16(*cpu_target.target_context.codegen().magic_tuple()):
        return builder.fpext(builder.bitcast(bits, shape(HALF)), shape(FLOAT))
    word = builder.zext(bits, shape(WORD))
    magnitude = builder.shl(builder.and_(word, constant(shape(WORD), 0x7FFF)), constant(shape(WORD), 13))
    scaled = builder.fmul(builder.bitcast(magnitude, shape(FLOAT)), constant(shape(FLOAT), 2.0**112))
    is_finite = builder.icmp_unsigned("<", magnitude, constant(shape(WORD), 0x0F800000))
    others = builder.or_(magnitude, constant(shape(WORD), 0x7F800000))  # infinity and NaN
    number = builder.select(is_finite, builder.bitcast(scaled, shape(WORD)), others)
    sign = builder.shl(builder.and_(word, constant(shape(WORD), 0x8000)), constant(shape(WORD), 16))
    return builder.bitcast(builder.or_(number, sign), shape(FLOAT))


def larger(builder: Any, a: Any, b: Any) -> Any:
    return builder.select(builder.fcmp_ordered(">", a, b), a, b)


def larger_or_nan(builder: Any, a: Any, b: Any) -> Any:
    is_a = builder.or_(builder.fcmp_ordered(">", a, b), builder.fcmp_unordered("uno", a, a))
    return builder.select(is_a, a, b)


@intrinsic(lambda a, b: vector(vector, vector))
def maximum_or_nan(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    """Return the larger number in each lane, or NaN if one of the two is NaN."""
    return larger_or_nan(builder, *args)


@intrinsic(lambda a, b, numbers, others: vector(vector, vector, vector, vector))
def where_below(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    """Return `numbers` where a < b, and `others` elsewhere."""
    return builder.select(builder.fcmp_ordered("<", args[0], args[1]), args[2], args[3])


@intrinsic(lambda numbers: vector(vector))
def floor(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    function_type = ir.FunctionType(FLOATS, [FLOATS])
    return builder.call(get_or_insert_function(builder.module, function_type, "llvm.floor.v16f32"), args)


@intrinsic(lambda numbers: vector(vector))
def power_of_2(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    """Return 2 to the power of each number, which must be an integer from -126 to 127."""
    exponent = builder.add(builder.fptosi(args[0], WORDS), constant(WORDS, 127))
    return builder.bitcast(builder.shl(exponent, constant(WORDS, 23)), FLOATS)


@intrinsic(lambda: vector())
def lane_numbers(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    """Return 0, 1, ..., 15."""
    return ir.Constant(FLOATS, [float(i) for i in range(WIDTH)])


# From a vector to one number


def reduction(combine: Callable[[Any, Any, Any], Any]) -> Callable[..., Any]:
    """Return a generator of code that reduces a vector to one number by combining its halves four times."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        numbers, distance = args[0], WIDTH
        while distance := distance // 2:
            moved = ir.Constant(sixteen(WORD), [(i + distance) % WIDTH for i in range(WIDTH)])
            numbers = combine(builder, numbers, builder.shuffle_vector(numbers, numbers, moved))
        return builder.extract_element(numbers, WORD(0))

    return generate


sum_of = intrinsic(lambda numbers: types.float32(vector))(reduction(ir.IRBuilder.fadd))


@intrinsic(lambda numbers: types.float32(vector))
def first_of(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    return builder.extract_element(args[0], WORD(0))


largest_of = intrinsic(lambda numbers: types.float32(vector))(reduction(larger))


largest_or_nan = intrinsic(lambda numbers: types.float32(vector))(reduction(larger_or_nan))


# Pointers


def pointer_to(dtype: types.Type) -> Callable[..., Any]:
    """Return an intrinsic that turns an address into a pointer to `dtype`."""

    @intrinsic(lambda address: types.CPointer(dtype)(types.int64))
    def pointer(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], context.get_value_type(signature.return_type))

    return pointer


floats = pointer_to(types.float32)
integers = pointer_to(types.int64)


@intrinsic(lambda address, like: types.CPointer(like.dtype)(types.int64, like))
def stored(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    """Return a pointer to the numbers at an address, which have the type of `like`."""
    return builder.inttoptr(args[0], context.get_value_type(signature.return_type))


@intrinsic(lambda memory, i: memory(memory, types.intp))
def at(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    """Return a pointer to element i."""
    return builder.gep(args[0], [args[1]])


@intrinsic(lambda memory, like: like(memory, like))
def as_type(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    """Return `memory` as a pointer of the same type as `like`."""
    return builder.bitcast(args[0], context.get_value_type(signature.return_type))


@intrinsic(lambda memory, i: types.int64(memory, types.intp))
def get(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    """Return element i of int64 memory."""
    return builder.load(builder.gep(args[0], [args[1]]))


@intrinsic(lambda memory, i, value: types.void(memory, types.intp, types.int64))
def put(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    """Set element i of int64 memory to `value`."""
    builder.store(args[2], builder.gep(args[0], [args[1]]))
    return context.get_dummy_value()


def fields_at(fields: Any) -> Callable[..., Any]:
    """Return an intrinsic that reads a named tuple of int64 numbers, each with load_acquire()'s promise."""
    kind = types.NamedUniTuple(types.int64, len(fields._fields), fields)

    @intrinsic(lambda memory: kind(memory))
    def read_fields(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        places = [builder.gep(args[0], [ir.Constant(ir.IntType(64), i)]) for i in range(len(kind))]
        numbers = [builder.load_atomic(place, "acquire", 8) for place in places]
        return context.make_tuple(builder, signature.return_type, numbers)

    return read_fields


# exp(x) as a polynomial instead of a call, so that a loop over it can be vectorized

LOG2_E = np.float32(1.44269504)
LN_2_HIGH, LN_2_LOW = np.float32(0.693359375), np.float32(-2.12194440e-4)  # their sum is ln 2 with twice the digits
LOWEST, HIGHEST = np.float32(-88.0), np.float32(88.0)  # the range of exp()


@kernel
def exp_of(x: Memory) -> Any:
    """Return e to the power of each of 16 numbers up to 88, to within 3 units in the last place, and 0 below -87.7.

    exp(x) is 2**k * exp(r) with a whole k and |r| at most ln(2) / 2; exp(r) is its Taylor series.
    """
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


@kernel
def exp(x: float) -> float:
    """Return e to the power of one number, or of 88 if it is larger."""
    result: float = first_of(exp_of(splat(min(x, HIGHEST))))
    return result
