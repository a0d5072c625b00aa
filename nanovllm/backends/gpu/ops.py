"""A table of a step's operations, filled with plain functions or with functions that launch Triton kernels."""

import os
from collections.abc import Callable
from typing import NamedTuple

from . import plain


class Ops(NamedTuple):
    """The functions that compute a step, described in plain.py. Each writes its result into one of its arguments."""

    paged_decode: Callable[..., None]
    paged_prefill: Callable[..., None]
    rotate_and_write: Callable[..., None]
    add_rms_norm: Callable[..., None]
    silu_and_mul: Callable[..., None]
    sample_rows: Callable[..., None]
    gemv: Callable[..., None]
    gated_gemv: Callable[..., None]


PLAIN = Ops(*(getattr(plain, name) for name in Ops._fields))


def triton_ops() -> Ops:
    """Return the functions that launch kernels. Raise ImportError if triton is not installed."""
    os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")  # triton 3.9 warns that fusion will be off by default
    from .attention_kernels import paged_decode, paged_prefill
    from .layer_kernels import add_rms_norm, gated_gemv, gemv, rotate_and_write, silu_and_mul
    from .sampling_kernels import sample_rows

    return Ops(paged_decode, paged_prefill, rotate_and_write, add_rms_norm, silu_and_mul, sample_rows, gemv, gated_gemv)
