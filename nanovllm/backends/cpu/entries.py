"""What is compiled: each function that Python calls, and for which types."""

from typing import Any

import numpy as np
import torch

from . import step_attention
from .attention import Pool
from .decode_step import decode_step
from .layers import add_and_norm, silu_and_mul
from .matmul import packed_linear, type_of
from .plan import like_of
from .sampler import find_peaks, join_pieces
from .step_attention import attend_step
from .step_parts import Model, Room, Sizes, Step, Weights


def entries(dtype: torch.dtype) -> list[tuple[Any, tuple]]:
    """Each function with example arguments: only their types count."""
    like, shape = like_of(dtype), zeros(Pool)
    few = Model(like, like_of(type_of(dtype)), shape, zeros(Sizes), zeros(Weights), zeros(Room), np.float32(0))
    many = (zeros(step_attention.Heads)._replace(eps=0.0), zeros(step_attention.Plan), zeros(step_attention.Room))
    return [
        (decode_step, (0, 0, zeros(Step), few)),
        (attend_step, (0, 0, 0, 0, 0, like, shape, *many)),
        (add_and_norm, (0, 0, 0, 0.0, 0, 0, 0, like, 0)),
        (silu_and_mul, (0, 0, 0, 0, like, 0)),
        (packed_linear, (0, 0, 0, 0, 0, 0, 0, 0, like_of(type_of(dtype)), like)),
        (join_pieces, (0, 0, 0, 0, 0, 0, 0)),
        *((find_peaks, (0, 0, 0, like_of(stored), 0, 0, 0)) for stored in {dtype, torch.float32}),
    ]


def zeros(kind: Any) -> Any:
    """Return a named tuple of zeros."""
    return kind(*[0] * len(kind._fields))
