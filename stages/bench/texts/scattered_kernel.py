"""The C++ text's attention, compiled, and a chain of addresses. They need numba."""

import math
from typing import Any

import numba
import numpy as np

Array = np.ndarray[Any, Any]


@numba.njit(fastmath=True)
def attend(query: Array, keys: Array, values: Array, table: Array, block_size: int, out: Array) -> None:
    """Attend to all slots: heads outside, tokens inside, each token through the block table.

    query, out [heads, dim]; keys, values [slots, heads, dim]; table [slots / block_size], which is not checked
    """
    slots, heads, dim = keys.shape
    scores, total, scale = np.empty(slots, np.float32), np.empty(dim, np.float32), np.float32(1 / math.sqrt(dim))
    for head in range(heads):
        q = query[head]
        for token in range(slots):
            key = keys[table[token // block_size] * block_size + token % block_size, head]
            score = np.float32(0)
            for i in range(dim):
                score += q[i] * key[i]
            scores[token] = score * scale
        weights = np.exp(scores - scores.max())
        weights /= weights.sum()
        total[:] = 0
        for token in range(slots):
            value = values[table[token // block_size] * block_size + token % block_size, head]
            weight = weights[token]
            for i in range(dim):
                total[i] += weight * value[i]
        out[head] = total


@numba.njit
def follow(links: Array, count: int) -> int:
    """Follow `count` links from row 0, and return the row at the end. links [rows, 8]; column 0 is the next row."""
    at = 0
    for _ in range(count):
        at = links[at, 0]
    return at
