"""exp(x) without a call: a polynomial, so that a loop over it becomes one over vectors."""

from typing import Any

import numpy as np
from numba import njit, types
from numba.core.extending import intrinsic

from .vectors import FLOAT, OPTIONS

LOG2_E = np.float32(1.44269504)
LN_2_HIGH, LN_2_LOW = np.float32(0.693359375), np.float32(-2.12194440e-4)  # their sum is ln 2, to twice the digits
LOWEST, HIGHEST = np.float32(-87.0), np.float32(88.0)  # below and above them float32 has no normal numbers
IN_ORDER = OPTIONS | {"fastmath": {"contract", "nsz"}}  # else the two parts of ln 2 are added up first: r loses digits


@intrinsic
def float_of_bits(typing: Any, bits: Any) -> Any:
    """Return the float32 of these 32 bits."""
    return types.float32(types.int32), lambda context, builder, signature, args: builder.bitcast(args[0], FLOAT)


@njit(**IN_ORDER)
def exp(x: float) -> float:
    """exp of a float32, within 2 of its last digit; x below -87 counts as -87, above 88 as 88.

    exp(x) = 2**k * exp(r) with a whole k and r within half of ln 2; exp(r) by its Taylor series.
    """
    x = min(max(x, LOWEST), HIGHEST)
    k = np.floor(x * LOG2_E + np.float32(0.5))
    r = (x - k * LN_2_HIGH) - k * LN_2_LOW
    p = np.float32(1 / 5040)
    p = p * r + np.float32(1 / 720)
    p = p * r + np.float32(1 / 120)
    p = p * r + np.float32(1 / 24)
    p = p * r + np.float32(1 / 6)
    p = p * r + np.float32(0.5)
    p = p * r + np.float32(1)
    p = p * r + np.float32(1)
    return p * float_of_bits((np.int32(k) + np.int32(127)) << np.int32(23))
