"""A table of a step's operations, filled with plain functions or with functions that launch Triton kernels."""

import os
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import OutOfMemoryError

from ...log import logger
from . import plain


class Ops(NamedTuple):
    """The functions that compute a step, described in plain.py. Each writes its result into one of its arguments."""

    paged_decode: Callable[..., None]
    paged_prefill: Callable[..., None]
    rotate_and_write: Callable[..., None]
    embed: Callable[..., None]
    add_rms_norm: Callable[..., None]
    silu_and_mul: Callable[..., None]
    sample_rows: Callable[..., None]
    gemv: Callable[..., None]
    gated_gemv: Callable[..., None]
    gemm: Callable[..., None]


PLAIN = Ops(*(getattr(plain, name) for name in Ops._fields))


def triton_ops() -> Ops:
    """Return the functions that launch kernels. Raise ImportError if triton is not installed."""
    os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")  # triton 3.9 warns that fusion will be off by default
    from .attention_kernels import paged_decode, paged_prefill
    from .gemm_kernels import gemm
    from .layer_kernels import add_rms_norm, embed, gated_gemv, gemv, rotate_and_write, silu_and_mul
    from .sampling_kernels import sample_rows

    layer_ops = rotate_and_write, embed, add_rms_norm, silu_and_mul, sample_rows, gemv, gated_gemv, gemm
    return Ops(paged_decode, paged_prefill, *layer_ops)


class Fallback:
    """A function that launches a kernel, or a plain function once the kernel could not be compiled or launched."""

    def __init__(self, name: str, launch: Callable[..., None]) -> None:
        self._name, self.launch, self.has_failed = name, launch, False

    def __call__(self, *arguments: Any) -> None:
        if not self.has_failed:
            try:
                return self.launch(*arguments)
            except (AssertionError, OutOfMemoryError):  # a fault of the caller; too little memory
                raise
            except Exception as error:
                self.has_failed = True
                line = f"{type(error).__name__}: {error}".splitlines()[0]
                logger.warning(
                    "this GPU cannot run the kernel of %s, so plain operations replace it: %s", self._name, line
                )
        getattr(PLAIN, self._name)(*arguments)


def with_fallbacks(ops: Ops) -> Ops:
    """Return the same operations, of which each falls back to plain operations by itself."""
    return Ops(*map(Fallback, Ops._fields, ops))


def without_fallbacks(ops: Ops) -> Ops:
    """Return the same operations, which raise errors instead of falling back."""
    return Ops(*(op.launch if isinstance(op, Fallback) else op for op in ops))


def plain_names(ops: Ops) -> list[str]:
    """Return the names of the operations that have fallen back."""
    return [name for name, op in zip(Ops._fields, ops, strict=True) if isinstance(op, Fallback) and op.has_failed]
