"""Fixes for Triton's interpreter (3.6 to 3.9), so that kernels need no special case for tests.

The interpreter stores a bfloat16 as its 16 bits. Its conversion from float32 truncates, although GPUs round to nearest
even, and its tl.dot multiplies the bits as if they were integers. In its conversion to fp8, a number that is rounded up
to a power of two loses the carry, and becomes half of it. The result of a comparison keeps the type of its
operands, so a scalar one becomes an integer mask when it is broadcast, which tl.load rejects from 3.9 on. The end of a
loop is an array of one element, which 3.6 converts in a way that NumPy 2.4 has removed.
"""

from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle


def to_float32(bits: np.ndarray) -> np.ndarray:
    """Return the values of bfloat16 numbers given as uint16 bits.

    >>> to_float32(np.array([0x3F80, 0xC000], dtype=np.uint16)).tolist()
    [1.0, -2.0]
    """
    return (bits.astype(np.uint32) << 16).view(np.float32)


def to_bfloat16(numbers: np.ndarray) -> np.ndarray:
    """Round float32 numbers to bfloat16, to nearest even, and return their bits as uint16.

    >>> [hex(bits) for bits in to_bfloat16(np.array([1.0, 1.0 + 3 / 256, 1.0 + 1 / 256], dtype=np.float32))]
    ['0x3f80', '0x3f82', '0x3f80']
    """
    rounded = torch.from_numpy(np.array(numbers, dtype=np.float32)).to(torch.bfloat16)
    return rounded.view(torch.int16).numpy().view(np.uint16)


def to_fp8(numbers: np.ndarray) -> np.ndarray:
    """Round float32 numbers to fp8 (e4m3), and return their bits as uint8.

    >>> [hex(bits) for bits in to_fp8(np.array([1.0, 1.97], dtype=np.float32))]
    ['0x38', '0x40']
    """
    rounded = torch.from_numpy(np.array(numbers, dtype=np.float32)).to(torch.float8_e4m3fn)
    return rounded.view(torch.uint8).numpy()


def fix_interpreter() -> None:
    """Patch the interpreter of this process."""
    cast, dot, splat = InterpreterBuilder.cast_impl, InterpreterBuilder.create_dot, InterpreterBuilder.create_splat
    convert = InterpreterBuilder.create_fp_to_fp

    def cast_impl(self: Any, source: Any, target_type: Any) -> Any:
        dtypes = source.dtype.scalar, target_type.scalar
        if dtypes == (tl.bfloat16, tl.float32):
            return TensorHandle(to_float32(source.data), tl.float32)
        if dtypes == (tl.float32, tl.bfloat16):
            return TensorHandle(to_bfloat16(source.data), tl.bfloat16)
        return cast(self, source, target_type)

    def create_fp_to_fp(self: Any, source: Any, target_type: Any, rounding_mode: Any) -> Any:
        if (source.dtype.scalar, target_type.scalar) == (tl.float32, tl.float8e4nv):
            return TensorHandle(to_fp8(source.data), tl.float8e4nv)
        return convert(self, source, target_type, rounding_mode)

    def create_dot(self: Any, a: Any, b: Any, *others: Any) -> Any:
        if a.dtype.scalar == tl.bfloat16:
            a, b = (TensorHandle(to_float32(each.data), tl.float32) for each in (a, b))
        return dot(self, a, b, *others)

    def create_splat(self: Any, target_type: Any, source: Any) -> Any:
        is_bool = source.data.dtype == np.bool_
        return splat(self, target_type, TensorHandle(source.data, tl.int1) if is_bool else source)

    patch_tensor = interpreter._patch_lang_tensor

    def patch_lang_tensor(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch_lang_tensor
    InterpreterBuilder.cast_impl, InterpreterBuilder.create_dot = cast_impl, create_dot
    InterpreterBuilder.create_splat, InterpreterBuilder.create_fp_to_fp = create_splat, create_fp_to_fp
