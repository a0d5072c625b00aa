"""Ops: the functions that a model's steps are made of. Kernels for a GPU, or their plain twins for tests."""

from collections.abc import Callable
from typing import NamedTuple

from . import plain


class Ops(NamedTuple):
    """Each writes into a tensor that it is given: nothing is allocated, nothing is read back. plain.py says what."""

    paged_decode: Callable[..., None]
    paged_prefill: Callable[..., None]
    rotate_and_write: Callable[..., None]
    add_rms_norm: Callable[..., None]
    silu_and_mul: Callable[..., None]
    find_likeliest: Callable[..., None]
    gemv: Callable[..., None]
    gated_gemv: Callable[..., None]


PLAIN = Ops(*(getattr(plain, name) for name in Ops._fields))


def triton_ops() -> Ops:
    """Return the kernels. Raise ImportError if triton is not installed."""
    from .activation import silu_and_mul
    from .decode import paged_decode
    from .gemv import gated_gemv, gemv
    from .likeliest import find_likeliest
    from .norm import add_rms_norm
    from .prefill import paged_prefill
    from .rope_write import rotate_and_write

    return Ops(
        paged_decode, paged_prefill, rotate_and_write, add_rms_norm, silu_and_mul, find_likeliest, gemv, gated_gemv
    )
