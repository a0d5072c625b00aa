"""Many rows of x times a packed weight: there is more to compute than to read, and registers are what is scarce.

Eight rows of x meet two columns of sixteen outputs in sixteen registers. A number of x is read and splatted, a vector
of the weight is read, and each takes part in as many products as the other side has. So the weight is packed: what is
read one after the other lies one behind the other.

    weight [outputs, size]                 packed [outputs / 16, size / depth, 16, depth]
    row 0    a0 a1 a2 a3 ...               a0 a1 b0 b1 c0 c1 ... | a2 a3 b2 b3 c2 c3 ... | ...
    row 1    b0 b1 b2 b3 ...               depth 2: pairs of bfloat16, where one instruction takes pairs; else 1

While a column is used, the next one is asked for: eight rows compute for so long that it is there in time.
"""

import numpy as np
import torch
from numba import njit, prange, types
from torch import Tensor

from .blocks import load_block, per_line, prefetch, starts_of, store_rows
from .pairs import add_outer, are_pairs, depth_of
from .vectors import ENTRY, OPTIONS, WIDTH, Memory, at, stored

COLUMNS = 2 * WIDTH  # outputs that a block of registers has
ROWS = 8  # of x
CHUNK = 256  # rows of x: they stay in a core's cache while all columns go by


def type_of(dtype: torch.dtype) -> torch.dtype:
    """Return the type of an x for a packed weight: bfloat16 if the processor multiplies pairs of it."""
    bits = types.CPointer(types.uint16)
    return dtype if dtype == torch.bfloat16 and are_pairs(bits, bits) else torch.float32


def pack(weight: Tensor) -> Tensor:
    """weight [outputs, size] -> a vector of numbers, in the order above. At least 32 outputs, and an even size

    The last 32 outputs are the last block: it may overlap the one before, and nothing is written behind a row.
    """
    (outputs, size), depth = weight.shape, 2 if type_of(weight.dtype) == torch.bfloat16 else 1
    firsts = torch.arange(0, outputs, COLUMNS).clamp(max=outputs - COLUMNS)
    rows = (firsts[:, None] + torch.arange(COLUMNS)).flatten()
    return weight[rows].view(-1, WIDTH, size // depth, depth).transpose(1, 2).flatten()


@njit(**OPTIONS)
def matmul(
    x: Memory, rows: int, size: int, weight: Memory, bias: Memory, start: int, end: int, outputs: int, out: Memory,
    stride: int,
) -> None:  # fmt: skip
    """out[m, r] = x[m] * weight[r] + bias[r] for r in start .. end - 1; `start` is a multiple of COLUMNS.

    x [rows, size], of type_of(weight); weight packed; bias [outputs]; out [rows, stride]
    """
    pace = COLUMNS // -(-rows // ROWS)  # of what is asked for: the next block, while all rows meet this one
    for r in range(start, end, COLUMNS):
        first, columns = min(r, outputs - COLUMNS), (r * size, (r + WIDTH) * size)
        for m in range(0, rows, ROWS):
            last = rows - 1  # it may stand there several times
            eight = (
                m, min(m + 1, last), min(m + 2, last), min(m + 3, last), min(m + 4, last), min(m + 5, last),
                min(m + 6, last), min(m + 7, last),
            )  # fmt: skip
            ahead = (r + COLUMNS) * size + m // ROWS * size * pace
            places = starts_of(eight, stride)
            block(
                x, starts_of(eight, size), size, weight, columns, ahead, pace, at(bias, first), at(out, first), places
            )


@njit(**OPTIONS)
def block(
    x: Memory, rows: tuple[int, ...], size: int, weight: Memory, columns: tuple[int, int], ahead: int, pace: int,
    bias: Memory, out: Memory, places: tuple[int, ...],
) -> None:  # fmt: skip
    """Eight rows of x and 32 outputs. rows, columns, places: where they start, in x, in the weight and in out"""
    sums, depth, line = load_block(bias, (0, 0, 0, 0, 0, 0, 0, 0), (0, WIDTH)), depth_of(x, weight), per_line(weight)
    for k in range(0, size, depth):
        sums = add_outer(sums, x, rows, k, weight, columns, k * WIDTH)
        prefetch(weight, ahead + k * pace)
        prefetch(weight, ahead + k * pace + line)
    store_rows(out, places, (0, WIDTH), sums)


@njit(parallel=True, **ENTRY)
def packed_linear(
    x: int, rows: int, size: int, weight: int, bias: int, outputs: int, out: int, workers: int, like_x: np.ndarray,
    like: np.ndarray,
) -> None:  # fmt: skip
    """x [rows, size] -> out [rows, outputs]. Addresses; like_x, like: arrays of the types of x, and of all else"""
    each = columns_of_piece(outputs, workers)
    for piece in prange(-(-outputs // each)):
        for m in range(0, rows, CHUNK):
            matmul(
                at(stored(x, like_x), m * size), min(CHUNK, rows - m), size, stored(weight, like), stored(bias, like),
                piece * each, min(piece * each + each, outputs), outputs, at(stored(out, like), m * outputs), outputs,
            )  # fmt: skip


@njit(**OPTIONS)
def columns_of_piece(outputs: int, workers: int) -> int:
    """Return the number of outputs of a piece: four pieces a worker, of whole blocks."""
    return -(-outputs // (4 * workers * COLUMNS)) * COLUMNS
