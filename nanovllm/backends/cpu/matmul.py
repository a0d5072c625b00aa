"""Linear layers: rows of x times a weight.

With few rows, reading the weight takes most of the time. With many rows, multiplication does, and registers are scarce:
matmul() multiplies up to eight rows of x by two columns of sixteen outputs in sixteen registers. It broadcasts each
number of x, loads each vector of the weight, and uses both in several products. The weight is packed so that it is read
sequentially:

    weight [outputs, size]                 packed [outputs / 16, size / depth, 16, depth]
    row 0    a0 a1 a2 a3 ...               a0 a1 b0 b1 c0 c1 ... | a2 a3 b2 b3 c2 c3 ... | ...
    row 1    b0 b1 b2 b3 ...               depth 2: pairs of bfloat16, where one instruction multiplies pairs; else 1

Packing moves numbers only inside blocks of 32 rows, so it works in place: a weight is never in memory twice. Up to 31
rows at the end keep their order, and linear() handles them. While one column is in use, the next one is prefetched.
"""

from .blocks import add_blocks, load_block, per_line, prefetch, starts_of, store_rows
from .dot import add_outer, depth_of, dot_rows
from .layout import COLUMNS, WIDTH
from .vectors import Memory, at, kernel, read

ROWS = 8  # of x, in a block of registers
FEW_ROWS = 4  # rows of x that linear() takes at a time, at most


@kernel
def packed_place(row: int, i: int, outputs: int, size: int, depth: int) -> int:
    """Return the position of number i of a row in a packed weight [outputs, size]."""
    if row >= outputs // COLUMNS * COLUMNS:
        return row * size + i
    return row // WIDTH * WIDTH * size + (i // depth * WIDTH + row % WIDTH) * depth + i % depth


@kernel
def matmul(
    x: Memory, rows: int, size: int, weight: Memory, bias: Memory, start: int, end: int, outputs: int, out: Memory,
    stride: int, adds: bool,
) -> None:  # fmt: skip
    """Set out[m, r] to x[m] * weight[r] + bias[r] for r from start to end - 1, with `start` a multiple of COLUMNS.

    x [rows, size] of type_of(weight); weight packed; bias [outputs]; out [rows, stride]. With `adds`, add to `out`.
    """
    eights = (rows + ROWS - 5) // ROWS  # blocks of 5 to 8 rows, which prefetch the next columns while they use these
    pace = max(1, COLUMNS // max(1, eights))
    num_packed, last = outputs // COLUMNS * COLUMNS, rows - 1  # the last row may appear several times in a block
    for r in range(start, min(end, num_packed), COLUMNS):
        columns, ahead, to = (r * size, (r + WIDTH) * size), (r + COLUMNS) * size, at(out, r)
        for m in range(0, rows, ROWS):
            more = ahead + m // ROWS * size * pace
            if rows - m == 1:
                block(x, (m,), size, weight, columns, more, pace, at(bias, r), to, stride, adds)
            elif rows - m == 2:
                block(x, (m, last), size, weight, columns, more, pace, at(bias, r), to, stride, adds)
            elif rows - m <= 4:
                block(x, (m, m + 1, m + 2, last), size, weight, columns, more, pace, at(bias, r), to, stride, adds)
            else:
                eight = (
                    m, m + 1, m + 2, m + 3, m + 4, min(m + 5, last), min(m + 6, last), min(m + 7, last)
                )  # fmt: skip
                block(x, eight, size, weight, columns, more, pace, at(bias, r), to, stride, adds)
    if end > num_packed:
        for m in range(0, rows, FEW_ROWS):
            some, to = at(x, m * size), at(out, m * stride)
            linear(weight, bias, max(start, num_packed), end, some, size, min(FEW_ROWS, rows - m), to, stride, adds)


@kernel
def block(
    x: Memory, rows: tuple[int, ...], size: int, weight: Memory, columns: tuple[int, int], ahead: int, pace: int,
    bias: Memory, out: Memory, stride: int, adds: bool,
) -> None:  # fmt: skip
    """Multiply some rows of x by the weights of 32 outputs. `columns` are start positions in the weight.

    Eight rows also prefetch the weight from `ahead` on, `pace` numbers for each number of a row.
    """
    starts, depth, line = starts_of(rows, size), depth_of(x, weight), per_line(weight)
    sums, to = load_block(bias, starts_of(rows, 0), (0, WIDTH)), starts_of(rows, stride)
    for k in range(0, size, depth):
        sums = add_outer(sums, x, starts, k, weight, columns, k * WIDTH)
        if len(rows) == ROWS:  # fewer rows read two columns as fast as the processor prefetches them
            prefetch(weight, ahead + k * pace)
            prefetch(weight, ahead + k * pace + line)
    if adds:
        sums = add_blocks(sums, load_block(out, to, (0, WIDTH)))
    store_rows(out, to, (0, WIDTH), sums)


@kernel
def linear(
    weight: Memory, bias: Memory, start: int, end: int, x: Memory, size: int, rows: int, out: Memory, stride: int,
    adds: bool,
) -> None:  # fmt: skip
    """Do the same as matmul() for the unpacked rows of a weight and at most FEW_ROWS rows of x."""
    for r in range(start, end):
        dot_rows(at(weight, r * size), x, size, rows, read(bias, r), at(out, r), stride, adds)
