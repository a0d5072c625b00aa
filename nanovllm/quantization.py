"""Weights in 8 or 4 bits. A step of few rows spends its time reading weights, so fewer bytes make it faster.

    int8   weight = scale * (q - 128)        q from 0 to 255; a scale per output, or per 32 or 16 numbers of a row
                    ... + minimum            for checkpoints with 2, 3 or 5 bits, or several types in a layer
    int4   weight = scale * q + minimum      q from 0 to 15; a scale and a minimum per 32 numbers

Floating-point weights are quantized as they load, with a scale per output in int8, and bfloat16 scales and minima in
int4, where the head is in int8. The other formats are for checkpoints that were quantized before: they hold the same
numbers exactly.

The integers lie in the order in which CPU kernels read them, four of an output side by side, for 16 outputs. These 64
bytes are a line. A group of 32 numbers takes 8 lines in int8, 4 in int4:

    weight [outputs, size]      int8                                     int4
    row 0    a0 a1 a2 a3 ...    a0 a1 a2 a3 b0 b1 b2 b3 ...              a0|a4 a1|a5 a2|a6 a3|a7 b0|b4 ...
    row 1    b0 b1 b2 b3 ...    a4 a5 a6 a7 b4 b5 b6 b7 ...              lower half | upper half of a byte

The scales and minima of a group follow in lines of their own, so that a kernel reads one stream. Rows are padded with
zeros to a multiple of 32. Plain operations turn a weight back into floating point to use it.
"""

from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .llama import LlamaForCausalLM

GROUP = 32  # numbers of a row that share a scale and a minimum in int4, and a scale in a kernel's x
COLUMN = 16  # outputs side by side
PADDED = 32  # outputs that a kernel computes at a time
AT_A_TIME = 1 << 20  # numbers that are quantized at a time
LOWER = 0x0F0F0F0F  # halves of four bytes


class Format(IntEnum):
    """The layout of a weight. The value is the number of lines of a group."""

    INT4 = 5  # one line of scales and minima, bfloat16
    INT4_FLOAT32 = 6  # a line of scales, and one of minima
    INT8 = 8  # a scale per output, outside of the lines
    INT8_GROUPS = 9  # a line of float32 scales
    INT8_HALF_GROUPS = 10  # two of them, for 16 numbers each
    INT8_MINIMA = 12  # two of them, and two of minima: the only format that holds the numbers of all others

    @property
    def bits(self) -> int:
        """Return the bits of an integer."""
        return 4 if self <= Format.INT4_FLOAT32 else 8

    @property
    def has_minima(self) -> bool:
        """Return whether numbers are scale * q + minimum."""
        return self.bits == 4 or self == Format.INT8_MINIMA


class Integers(NamedTuple):
    """A weight in integers: q uint8 [outputs, size]; scales, minima float32 [outputs, groups], groups of any one size.

    With minima, weight = scale * q + minimum; without, scale * (q - 128).
    """

    q: Tensor
    scales: Tensor
    minima: Tensor | None = None


class QuantizedLinear(nn.Module):
    """A linear layer with a weight in 8 or 4 bits."""

    def __init__(self, linear: nn.Linear, format: Format) -> None:
        """Make room on the layer's device. Raise ValueError if 32 does not divide `in_features`."""
        super().__init__()
        outputs, size = linear.out_features, linear.in_features
        if size % GROUP:
            raise ValueError(f"a weight of {outputs} x {size} cannot be quantized: its rows need a multiple of {GROUP}")
        self.out_features, self.in_features, self.format = outputs, size, format
        columns, device = -(-outputs // PADDED) * PADDED // COLUMN, linear.weight.device
        values = torch.zeros(columns, size // GROUP * format, COLUMN, 4, dtype=torch.uint8, device=device)
        scales = torch.zeros(columns if format == Format.INT8 else 0, COLUMN, dtype=torch.int32, device=device)
        self.values = nn.Parameter(values, requires_grad=False)
        self.scales = nn.Parameter(scales, requires_grad=False)  # the bits of float32, which model.to() leaves alone
        self.bias = linear.bias
        self.keeps_wide = False
        self._wide: Tensor | None = None  # the weight in floating point

    def keep_wide(self, keeps_wide: bool) -> None:
        """Keep the weight in floating point from its first use on, or drop it: it makes plain operations fast."""
        self.keeps_wide = keeps_wide
        self._wide = self._wide if keeps_wide else None

    def quantize(self, parts: Sequence[Tensor]) -> None:
        """Set the weight to these floating-point parts [rows, in_features], one below the other."""
        for start in range(0, self.out_features, step := self._rows_at_a_time()):
            rows = rows_between(parts, start, min(start + step, self.out_features)).to(self.values.device).float()
            self._store(start, quantize_int4(rows) if self.format.bits == 4 else quantize_int8(rows))

    def store(self, parts: Sequence[Integers]) -> None:
        """Set the weight to these parts, one below the other. Their numbers must fit the format."""
        first = 0
        for part in parts:
            assert first % COLUMN == 0, f"a part begins at row {first}"
            for start in range(0, len(part.q), step := self._rows_at_a_time()):
                rows = slice(start, start + step)
                minima = None if part.minima is None else part.minima[rows]
                self._store(first + start, Integers(part.q[rows], part.scales[rows], minima))
            first += len(part.q)

    def _rows_at_a_time(self) -> int:
        return max(1, AT_A_TIME // self.in_features // PADDED) * PADDED

    def _store(self, start: int, integers: Integers) -> None:
        """Set some rows of the weight. The last chunk may be partial."""
        rows = lines_of(integers, self.format)  # [num_rows, groups, lines]
        padding, columns = -len(rows) % COLUMN, slice(start // COLUMN, -(-(start + len(rows)) // COLUMN))
        lines = F.pad(rows.flatten(1), (0, 0, 0, padding)).unflatten(0, (-1, COLUMN))
        self.values[columns].view(torch.int32)[..., 0] = lines.transpose(1, 2)
        if self.format == Format.INT8:
            scales = F.pad(integers.scales.flatten(), (0, padding)).view(torch.int32)
            self.scales[columns] = scales.view(-1, COLUMN)

    def dequantize(self) -> Tensor:
        """Return the weight, float32 [out_features, in_features]."""
        return self.rows(torch.arange(self.out_features, device=self.values.device))

    def rows(self, numbers: Tensor) -> Tensor:
        """Return rows of the weight, float32 [len(numbers), in_features]: `numbers` is int64."""
        column, place = numbers // COLUMN, numbers % COLUMN
        words = self.values.detach().view(torch.int32)[..., 0]  # [columns, lines of all groups, 16]
        lines = words[column, :, place].unflatten(1, (-1, self.format))  # [len(numbers), groups, lines]
        scales = self.scales.detach()[column, place].view(torch.float32) if self.format == Format.INT8 else None
        return weight_of(lines, self.format, scales)

    def forward(self, x: Tensor) -> Tensor:
        """Return x [num_rows, in_features] times the weight: [num_rows, out_features]."""
        weight = self.dequantize().to(x.dtype) if self._wide is None else self._wide
        if self.keeps_wide:
            self._wide = weight
        return F.linear(x, weight, self.bias)


class QuantizedEmbedding(nn.Module):
    """An embedding that is tied to a quantized head."""

    def __init__(self, head: QuantizedLinear, dtype: torch.dtype) -> None:
        super().__init__()
        self.head, self._dtype = head, dtype

    def forward(self, input_ids: Tensor) -> Tensor:
        """Return the embeddings [num_tokens, size] of `input_ids`, int64 [num_tokens]."""
        return self.head.rows(input_ids).to(self._dtype)


def keep_wide(model: nn.Module, num_bytes: int, dtype: torch.dtype) -> None:
    """Let quantized layers keep their weights in `dtype`, too, as far as `num_bytes` allow. With 0, drop all of them."""
    for layer in model.modules():
        if isinstance(layer, QuantizedLinear):
            size = layer.out_features * layer.in_features * dtype.itemsize
            layer.keep_wide(size <= num_bytes)
            num_bytes -= size if layer.keeps_wide else 0


def format_at_load(quantization: str) -> Callable[[str], Format]:
    """Return a function from a layer's name to its format, for a model whose weights are floating-point numbers."""
    of_layers = {"int8": Format.INT8, "int4": Format.INT4}[quantization]
    return lambda name: Format.INT8 if name == "lm_head" else of_layers


def quantize_layers(model: LlamaForCausalLM, format_of: Callable[[str], Format | None], dtype: torch.dtype) -> None:
    """Replace the linear layers of a model without weights that have a format, and an embedding tied to such a head."""
    for parent_name, parent in list(model.named_modules()):
        for name, layer in list(parent.named_children()):
            if isinstance(layer, nn.Linear) and (format := format_of(f"{parent_name}.{name}".lstrip("."))):
                parent.register_module(name, QuantizedLinear(layer, format))
    head: nn.Module = model.lm_head
    if model.config.tie_word_embeddings and isinstance(head, QuantizedLinear):
        model.model.register_module("embed_tokens", QuantizedEmbedding(head, dtype))


def rows_between(parts: Sequence[Tensor], start: int, end: int) -> Tensor:
    """Return rows start to end - 1 of parts that lie one below the other."""
    found, first = [], 0
    for part in parts:
        found.append(part[max(0, start - first) : max(0, end - first)])
        first += len(part)
    return torch.cat(found)


def quantize_int8(rows: Tensor) -> Integers:
    """Return integers with a scale for each row [num_rows, size]."""
    scales = rows.abs().amax(1, keepdim=True) / 127
    q = (rows / divisor(scales)).round_().clamp_(-127, 127).add_(128)
    return Integers(q.to(torch.uint8), scales)


def quantize_int4(rows: Tensor) -> Integers:
    """Return integers with bfloat16 scales and minima for each 32 numbers of the rows [num_rows, size]."""
    groups = rows.unflatten(1, (-1, GROUP))  # [num_rows, groups, 32]
    lowest, highest = groups.aminmax(dim=2)  # [num_rows, groups]
    minima = lowest.to(torch.bfloat16).float()
    scales = ((highest - minima) / 15).to(torch.bfloat16).float()
    q = (groups - minima[..., None]).div_(divisor(scales)[..., None]).round_().clamp_(0, 15)
    return Integers(q.to(torch.uint8).flatten(1), scales, minima)


def divisor(scales: Tensor) -> Tensor:
    """Return scales to divide by: a group of equal numbers has scale 0."""
    return torch.where(scales == 0, 1, scales)


def floats_of(integers: Integers) -> Tensor:
    """Return a weight in floating point, float32 [outputs, size]."""
    q, scales, minima = integers
    groups = q.float().unflatten(1, (scales.shape[1], -1))
    scale = scales[..., None]
    result: Tensor = (groups - 128) * scale if minima is None else groups * scale + minima[..., None]
    return result.flatten(1)


def lines_of(integers: Integers, format: Format) -> Tensor:
    """Return each row's part of the lines, in words of four bytes: int32 [outputs, groups, format]."""
    q, scales, minima = integers
    if format == Format.INT8_MINIMA and minima is not None:
        q = q + 128
    fours: Tensor = q.contiguous().view(torch.int32).unflatten(1, (-1, GROUP // 4))  # [outputs, groups, 8]
    if format == Format.INT8:
        return fours
    times = fours.shape[1] * (2 if format >= Format.INT8_HALF_GROUPS else 1) // scales.shape[1]
    more = scales.repeat_interleave(times, 1).unflatten(1, (fours.shape[1], -1))  # [outputs, groups, scales of a group]
    if format.has_minima:
        below = torch.zeros_like(scales) if minima is None else minima
        more = torch.cat((more, below.repeat_interleave(times, 1).view_as(more)), 2)
    if format.bits == 4:
        fours = fours[..., 0::2] | fours[..., 1::2] << 4
    return torch.cat((fours, (more.to(torch.bfloat16) if format == Format.INT4 else more).view(torch.int32)), 2)


def weight_of(lines: Tensor, format: Format, scales: Tensor | None) -> Tensor:
    """Return rows of a weight, float32 [num_rows, size], the inverse of lines_of(). Only INT8 has scales [num_rows]."""
    words, more = lines.split((format.bits, format - format.bits), 2)
    if format.bits == 4:
        words = torch.stack((words & LOWER, words >> 4 & LOWER), 3).flatten(2)
    q = words.contiguous().view(torch.uint8).float()  # [num_rows, groups, 32]
    if format.bits == 4:
        pairs = more.contiguous().view(torch.bfloat16 if format == Format.INT4 else torch.float32).float()
        scale, minimum = pairs.unsqueeze(2).unbind(3)  # [num_rows, groups, 1]
        weight: Tensor = q * scale + minimum
        return weight.flatten(1)
    each = more.contiguous().view(torch.float32) if scales is None else scales[:, None, None]
    each, *minima = each.chunk(2 if format.has_minima else 1, 2)
    parts = (q - 128).unflatten(2, (each.shape[2], -1))  # [num_rows, groups, scales of a group, numbers]
    weight = parts * each[..., None]
    return (weight + minima[0][..., None] if minima else weight).flatten(1)
