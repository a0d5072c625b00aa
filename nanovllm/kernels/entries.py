"""What is compiled: each function that Python calls, and for which types."""

from typing import Any

import numpy as np
import torch

from . import decode_step, step_attention
from .attention import Pool
from .layers import add_and_norm, silu_and_mul
from .step_attention import attend_step, like_of


def entries(dtype: torch.dtype) -> list[tuple[Any, tuple]]:
    """Each function with example arguments: only their types count."""
    like, shape = like_of(dtype), zeros(Pool)
    few = (zeros(decode_step.Sizes), zeros(decode_step.Weights), zeros(decode_step.Room), np.float32(0))
    many = (zeros(step_attention.Heads)._replace(eps=0.0), zeros(step_attention.Plan), zeros(step_attention.Room))
    return [
        (decode_step.decode_step, (0, 0, zeros(decode_step.Step), like, shape, *few)),
        (attend_step, (0, 0, 0, 0, 0, like, shape, *many)),
        (add_and_norm, (0, 0, 0, 0.0, 0, 0, 0, like, 0)),
        (silu_and_mul, (0, 0, 0, 0, like, 0)),
    ]


def zeros(kind: Any) -> Any:
    """A named tuple."""
    return kind(*[0] * len(kind._fields))
