"""Linear layers: rows of x times a weight.

With few rows, reading the weight takes most of the time. With many rows, multiplication does, and registers are scarce:
matmul() multiplies up to eight rows of x by two columns of sixteen outputs in sixteen registers. It broadcasts each
number of x, loads each vector of the weight, and uses both in several products. The weight is packed so that it is read
sequentially:

    weight [outputs, size]                 packed [outputs / 16, size / depth, 16, depth]
    row 0    a0 a1 a2 a3 ...               a0 a1 b0 b1 c0 c1 ... | a2 a3 b2 b3 c2 c3 ... | ...
    row 1    b0 b1 b2 b3 ...               depth 2: pairs of bfloat16, where one instruction multiplies pairs; else 1

Packing swaps numbers inside each block of 32 rows, so it happens in place: a weight is never in memory twice. Up to 31
rows at the end keep their order, and linear() reads them. While one column is in use, the next one is prefetched.
"""

import numpy as np
import torch
from numba import prange, types
from torch import Tensor, nn

from ...llama import LlamaForCausalLM
from .blocks import load_block, per_line, prefetch, starts_of, store_rows
from .dot import add_outer, are_pairs, depth_of, dot_rows
from .threads import is_forked
from .vectors import WIDTH, Memory, at, kernel, like_of, parallel_entry, read, stored

COLUMNS = 2 * WIDTH  # outputs in a block of registers
ROWS = 8  # of x, in a block of registers
FEW_ROWS = 4  # rows of x that linear() takes
PACKED_AT_A_TIME = 4  # columns of 16 outputs: a copy of more leaves holes among the weights
CHUNK = 256  # rows of x that stay in a core's cache while all columns go by


@kernel
def linear(
    weight: Memory, bias: Memory, has_bias: bool, start: int, end: int, x: Memory, size: int, rows: int, out: Memory,
    outputs: int,
) -> None:  # fmt: skip
    """Set out[m, r] to weight[r] * x[m] + bias[r] for r from start to end - 1.

    weight [outputs, size]; bias [outputs]; x [rows, size] with at most FEW_ROWS rows; out [rows, outputs]
    """
    for r in range(start, end):
        more = read(bias, r) if has_bias else np.float32(0)
        dot_rows(at(weight, r * size), x, size, rows, more, at(out, r), outputs)


def type_of(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of an x for a packed weight: bfloat16 if the processor multiplies pairs of it."""
    bits = types.CPointer(types.uint16)
    return dtype if dtype == torch.bfloat16 and are_pairs(bits, bits) else torch.float32


def columns_of(weight: Tensor) -> Tensor:
    """Return a view of the packed part of a packed `weight`: [outputs / 16, size / depth, 16, depth]."""
    (outputs, size), depth = weight.shape, 2 if type_of(weight.dtype) == torch.bfloat16 else 1
    return weight[: outputs // COLUMNS * COLUMNS].view(-1, size // depth, WIDTH, depth)


def pack(weight: Tensor) -> None:
    """Put the numbers of `weight` [outputs, size] in the order above. `size` must be even."""
    packed = columns_of(weight)
    swap_in_place(packed.view(-1, WIDTH, packed.shape[1], packed.shape[3]), packed)


def unpack(weight: Tensor) -> None:
    """Undo pack()."""
    packed = columns_of(weight)
    swap_in_place(packed, packed.view(-1, WIDTH, packed.shape[1], packed.shape[3]))


def swap_in_place(before: Tensor, after: Tensor) -> None:
    """Set `after` to `before` with dimensions 1 and 2 swapped. Both are views of the same memory.

    All memory that this needs is allocated first: an error leaves no weight half packed.
    """
    copy = torch.empty_like(after[:PACKED_AT_A_TIME])
    for source, target in zip(before.split(PACKED_AT_A_TIME), after.split(PACKED_AT_A_TIME), strict=True):
        part = copy[: len(source)]
        part.copy_(source.transpose(1, 2))
        target.copy_(part)


@kernel
def packed_place(row: int, i: int, outputs: int, size: int, depth: int) -> int:
    """Return the position of number i of a row in a packed weight [outputs, size]."""
    if row >= outputs // COLUMNS * COLUMNS:
        return row * size + i
    return row // WIDTH * WIDTH * size + (i // depth * WIDTH + row % WIDTH) * depth + i % depth


@kernel
def matmul(
    x: Memory, rows: int, size: int, weight: Memory, bias: Memory, start: int, end: int, outputs: int, out: Memory,
    stride: int,
) -> None:  # fmt: skip
    """Set out[m, r] to x[m] * weight[r] + bias[r] for r from start to end - 1, with `start` a multiple of COLUMNS.

    x [rows, size] of type_of(weight); weight packed; bias [outputs]; out [rows, stride]
    """
    pace = COLUMNS // -(-rows // ROWS)  # prefetch the next block while all rows use this one
    num_packed, last = outputs // COLUMNS * COLUMNS, rows - 1  # the last row may appear several times in a block
    for r in range(start, min(end, num_packed), COLUMNS):
        columns, ahead, to = (r * size, (r + WIDTH) * size), (r + COLUMNS) * size, at(out, r)
        if rows == 1:
            block(x, (0,), size, weight, columns, ahead, pace, at(bias, r), to, stride)
        elif rows == 2:
            block(x, (0, 1), size, weight, columns, ahead, pace, at(bias, r), to, stride)
        elif rows <= 4:
            block(x, (0, 1, 2, last), size, weight, columns, ahead, pace, at(bias, r), to, stride)
        else:
            for m in range(0, rows, ROWS):
                eight = (
                    m, min(m + 1, last), min(m + 2, last), min(m + 3, last), min(m + 4, last), min(m + 5, last),
                    min(m + 6, last), min(m + 7, last),
                )  # fmt: skip
                block(x, eight, size, weight, columns, ahead + m // ROWS * size * pace, pace, at(bias, r), to, stride)
    if end > num_packed:
        for m in range(0, rows, FEW_ROWS):
            some, to = at(x, m * size), at(out, m * stride)
            linear(weight, bias, True, max(start, num_packed), end, some, size, min(FEW_ROWS, rows - m), to, stride)


@kernel
def block(
    x: Memory, rows: tuple[int, ...], size: int, weight: Memory, columns: tuple[int, int], ahead: int, pace: int,
    bias: Memory, out: Memory, stride: int,
) -> None:  # fmt: skip
    """Multiply some rows of x by 32 outputs. `columns` are start positions in the weight."""
    starts, depth, line = starts_of(rows, size), depth_of(x, weight), per_line(weight)
    sums = load_block(bias, starts_of(rows, 0), (0, WIDTH))
    for k in range(0, size, depth):
        sums = add_outer(sums, x, starts, k, weight, columns, k * WIDTH)
        if len(rows) == ROWS:  # fewer rows read two columns as fast as the processor prefetches them
            prefetch(weight, ahead + k * pace)
            prefetch(weight, ahead + k * pace + line)
    store_rows(out, starts_of(rows, stride), (0, WIDTH), sums)


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
    """A linear layer whose weight is packed in place.

    A child that was forked can run no kernels. There each layer is unpacked when it is first used, because changing all
    weights in every child would copy the pages that it shares with its parent.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.plain = linear  # until unpack(), plain operations must not read its weight
        self.bias = linear.bias
        weight = linear.weight.detach()
        self._bias = weight.new_zeros(len(weight)) if linear.bias is None else linear.bias.detach()
        self._type = type_of(weight.dtype)  # cached, because computing it takes as long as a small matmul
        self._likes = like_of(self._type), like_of(weight.dtype)
        pack(weight)
        self._is_packed = True

    @property
    def weight(self) -> Tensor:
        """The weight in its packed order."""
        return self.plain.weight

    def unpack(self) -> nn.Linear:
        """Unpack the weight, if that has not been done yet, and return the plain layer."""
        if self._is_packed:
            unpack(self.weight.detach())
            self._is_packed = False
        return self.plain

    def forward(self, x: Tensor) -> Tensor:
        """Return x [num_rows, in_features] times the weight: [num_rows, out_features]."""
        if is_forked():
            result: Tensor = self.unpack()(x)
            return result
        (rows, size), outputs = x.shape, len(self._bias)
        out = x.new_empty(rows, outputs)
        x = x.to(self._type).contiguous()
        addresses = self.weight.data_ptr(), self._bias.data_ptr(), outputs, out.data_ptr()
        packed_linear(x.data_ptr(), rows, size, *addresses, torch.get_num_threads(), *self._likes)
        return out


class PackedEmbedding(nn.Module):
    """An embedding that is tied to a packed linear layer."""

    def __init__(self, embedding: nn.Embedding, head: PackedLinear) -> None:
        super().__init__()
        self.plain, self._head = embedding, head

    @property
    def weight(self) -> Tensor:
        """The weight in its packed order."""
        return self.plain.weight

    def unpack(self) -> nn.Embedding:
        """Unpack the weight, if that has not been done yet, and return the plain embedding."""
        self._head.unpack()
        return self.plain

    def forward(self, input_ids: Tensor) -> Tensor:
        """Return the embeddings [num_tokens, size] of `input_ids`, int64 [num_tokens]."""
        if is_forked():
            plain: Tensor = self.unpack()(input_ids)
            return plain
        columns, result = columns_of(self.weight), self.weight[input_ids]  # [num_tokens, size], right if not packed
        is_packed = input_ids < WIDTH * len(columns)
        rows = input_ids[is_packed]
        result[is_packed] = columns[rows // WIDTH, :, rows % WIDTH].flatten(1)
        return result


def why_not_packed(model: LlamaForCausalLM) -> str | None:
    """Return why the weights of `model` cannot be packed, or None if they can."""
    for linear in (module for module in model.modules() if isinstance(module, nn.Linear)):
        outputs, size = linear.weight.shape
        if size % 2:
            return f"a weight of {outputs} x {size} cannot be packed in pairs of columns"
    if model.config.intermediate_size % COLUMNS:
        return f"an MLP of {model.config.intermediate_size} cannot be packed in blocks of {COLUMNS} outputs"
    return None
