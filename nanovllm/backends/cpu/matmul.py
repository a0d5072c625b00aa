"""Linear layers: rows of x times a weight.

With few rows, reading the weight takes most of the time, and linear() reads it as it is stored. With many rows,
multiplication does, and registers are scarce: matmul() multiplies eight rows of x by two columns of sixteen outputs in
sixteen registers. It broadcasts each number of x, loads each vector of the weight, and uses both in several products.
The weight is packed so that it is read sequentially:

    weight [outputs, size]                 packed [outputs / 16, size / depth, 16, depth]
    row 0    a0 a1 a2 a3 ...               a0 a1 b0 b1 c0 c1 ... | a2 a3 b2 b3 c2 c3 ... | ...
    row 1    b0 b1 b2 b3 ...               depth 2: pairs of bfloat16, where one instruction multiplies pairs; else 1

While one column is in use, the next one is prefetched, and the eight rows take long enough for it to arrive in time.
"""

from pathlib import Path

import numpy as np
import torch
from numba import prange, types
from torch import Tensor, nn

from ...llama import LlamaForCausalLM
from .blocks import load_block, per_line, prefetch, starts_of, store_rows
from .dot import add_outer, are_pairs, depth_of, dot_rows
from .vectors import WIDTH, Memory, at, kernel, like_of, parallel_entry, read, stored, write

COLUMNS = 2 * WIDTH  # outputs in a block of registers
ROWS = 8  # of x, in a block of registers
CHUNK = 256  # rows of x that stay in a core's cache while all columns go by


@kernel
def linear(
    weight: Memory, bias: Memory, has_bias: bool, start: int, end: int, x: Memory, size: int, rows: int, out: Memory,
    outputs: int,
) -> None:  # fmt: skip
    """Set out[m, r] to weight[r] * x[m] + bias[r] for r from start to end - 1.

    weight [outputs, size]; bias [outputs]; x [rows, size] with at most 4 rows; out float32 [rows, outputs]
    """
    for r in range(start, end):
        dot_rows(at(weight, r * size), x, size, rows, at(out, r), outputs)
    if has_bias:
        for m in range(rows):
            for r in range(start, end):
                write(out, m * outputs + r, read(out, m * outputs + r) + read(bias, r))


def type_of(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of an x for a packed weight: bfloat16 if the processor multiplies pairs of it."""
    bits = types.CPointer(types.uint16)
    return dtype if dtype == torch.bfloat16 and are_pairs(bits, bits) else torch.float32


def pack(weight: Tensor) -> Tensor:
    """Return `weight` [outputs, size] as a vector of numbers in the order above.

    The weight must have at least 32 outputs and an even size. The last block always holds the last 32 outputs, so it
    may overlap the one before it, and nothing is written past the end of a row.
    """
    (outputs, size), depth = weight.shape, 2 if type_of(weight.dtype) == torch.bfloat16 else 1
    firsts = torch.arange(0, outputs, COLUMNS).clamp(max=outputs - COLUMNS)
    rows = (firsts[:, None] + torch.arange(COLUMNS)).flatten()
    return weight[rows].view(-1, WIDTH, size // depth, depth).transpose(1, 2).flatten()


@kernel
def matmul(
    x: Memory, rows: int, size: int, weight: Memory, bias: Memory, start: int, end: int, outputs: int, out: Memory,
    stride: int,
) -> None:  # fmt: skip
    """Set out[m, r] to x[m] * weight[r] + bias[r] for r from start to end - 1, with `start` a multiple of COLUMNS.

    x [rows, size] of type_of(weight); weight packed; bias [outputs]; out [rows, stride]
    """
    pace = COLUMNS // -(-rows // ROWS)  # prefetch the next block while all rows use this one
    for r in range(start, end, COLUMNS):
        first, columns = min(r, outputs - COLUMNS), (r * size, (r + WIDTH) * size)
        for m in range(0, rows, ROWS):
            last = rows - 1  # may appear several times in `eight`
            eight = (
                m, min(m + 1, last), min(m + 2, last), min(m + 3, last), min(m + 4, last), min(m + 5, last),
                min(m + 6, last), min(m + 7, last),
            )  # fmt: skip
            ahead = (r + COLUMNS) * size + m // ROWS * size * pace
            places = starts_of(eight, stride)
            block(
                x, starts_of(eight, size), size, weight, columns, ahead, pace, at(bias, first), at(out, first), places
            )


@kernel
def block(
    x: Memory, rows: tuple[int, ...], size: int, weight: Memory, columns: tuple[int, int], ahead: int, pace: int,
    bias: Memory, out: Memory, places: tuple[int, ...],
) -> None:  # fmt: skip
    """Multiply eight rows of x by 32 outputs.

    `rows`, `columns` and `places` are start positions in x, in the weight and in out.
    """
    sums, depth, line = load_block(bias, (0, 0, 0, 0, 0, 0, 0, 0), (0, WIDTH)), depth_of(x, weight), per_line(weight)
    for k in range(0, size, depth):
        sums = add_outer(sums, x, rows, k, weight, columns, k * WIDTH)
        prefetch(weight, ahead + k * pace)
        prefetch(weight, ahead + k * pace + line)
    store_rows(out, places, (0, WIDTH), sums)


@parallel_entry
def packed_linear(
    x: int, rows: int, size: int, weight: int, bias: int, outputs: int, out: int, workers: int, like_x: np.ndarray,
    like: np.ndarray,
) -> None:  # fmt: skip
    """Multiply x [rows, size] by a packed weight into out [rows, outputs].

    Tensors are passed as addresses. `like_x` has the type of x; `like` has the type of all the others.
    """
    each = outputs_per_task(outputs, workers)
    for task in prange(-(-outputs // each)):
        for m in range(0, rows, CHUNK):
            matmul(
                at(stored(x, like_x), m * size), min(CHUNK, rows - m), size, stored(weight, like), stored(bias, like),
                task * each, min(task * each + each, outputs), outputs, at(stored(out, like), m * outputs), outputs,
            )  # fmt: skip


@kernel
def outputs_per_task(outputs: int, workers: int) -> int:
    """Return the number of outputs in a task: whole blocks, and about four tasks per worker."""
    return -(-outputs // (4 * workers * COLUMNS)) * COLUMNS


class PackedLinear(nn.Module):
    """A linear layer with a second copy of its weight, packed for matmul().

    The plain weight stays in place: steps of few rows read it, and so do plain operations when kernels are dropped.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.plain = linear
        self.bias = linear.bias
        weight = linear.weight.detach()
        self.packed = pack(weight)
        self._bias = weight.new_zeros(len(weight)) if linear.bias is None else linear.bias.detach()
        self._type = type_of(weight.dtype)  # cached, because computing it takes as long as a small matmul
        self._likes = like_of(self._type), like_of(weight.dtype)

    @property
    def weight(self) -> Tensor:
        return self.plain.weight

    def forward(self, x: Tensor) -> Tensor:
        """Return x [num_rows, in_features] times the weight: [num_rows, out_features]."""
        (rows, size), outputs = x.shape, len(self._bias)
        out = x.new_empty(rows, outputs)
        x = x.to(self._type).contiguous()
        addresses = self.packed.data_ptr(), self._bias.data_ptr(), outputs, out.data_ptr()
        packed_linear(x.data_ptr(), rows, size, *addresses, torch.get_num_threads(), *self._likes)
        return out


def why_not_packed(model: LlamaForCausalLM) -> str | None:
    """Return why the weights of `model` cannot be packed, or None if they can."""
    linears = linears_of(model)
    for linear in linears:
        outputs, size = linear.weight.shape
        if outputs < COLUMNS or size % 2:
            return f"a weight of {outputs} x {size} cannot be packed in blocks of {COLUMNS} x 2"
    if model.config.intermediate_size % COLUMNS:
        return f"an MLP of {model.config.intermediate_size} cannot be packed in blocks of {COLUMNS} outputs"
    needed, free = sum(linear.weight.nbytes for linear in linears), free_memory()
    if free is not None and needed > free // 2:
        return f"packed weights need {needed:,} bytes, more than half of the {free:,} bytes available"
    return None


def linears_of(model: nn.Module) -> list[nn.Linear]:
    return [module for module in model.modules() if isinstance(module, nn.Linear)]


def free_memory() -> int | None:
    """Return the bytes available without swapping, or None if the system does not report them."""
    try:
        lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        return int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return None
