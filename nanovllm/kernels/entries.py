"""What is compiled: each function that Python calls, and for which types."""

from typing import Any

import numpy as np
import torch

from .attention import Pool
from .decode_step import Room, Sizes, Step, Weights, decode_step
from .few_rows import LIKE


def entries(dtype: torch.dtype) -> list[tuple[Any, tuple]]:
    """Each function with example arguments: only their types count."""
    like, eps = np.empty(0, LIKE[dtype]), np.float32(0)
    return [(decode_step, (0, 0, zeros(Step), like, zeros(Pool), zeros(Sizes), zeros(Weights), zeros(Room), eps))]


def zeros(kind: Any) -> Any:
    """A named tuple."""
    return kind(*[0] * len(kind._fields))
