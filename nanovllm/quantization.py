"""Weights in 8 or 4 bits. A step with few tokens spends its time reading weights, so smaller weights make it faster.

    int8   weight = scale * (q - 128)        q from 0 to 255; a scale per output, or per 32 or 16 numbers of a row
                    ... + minimum            for checkpoints with 2, 3 or 5 bits, or several types in a layer
    int4   weight = scale * q + minimum      q from 0 to 15; a scale and a minimum per 32 numbers of a row

Floating-point weights can be quantized while they load. With int8, each output has one scale. With int4, scales and
minima are in bfloat16, and the model's head is quantized to int8. The other formats are for checkpoints that are
already quantized, and represent their numbers exactly.

The integers are stored in the order in which CPU kernels read them. A line of 64 bytes has four bytes of each of 16
outputs, which are called a column. For each column, a group of 32 numbers takes 8 lines in int8, and 4 in int4:

    weight [outputs, size]        lines in int8                      lines in int4
    output 0    a0 a1 a2 a3 ...   0: a0 a1 a2 a3 b0 b1 b2 b3 ...     0: a0|a4 a1|a5 a2|a6 a3|a7 b0|b4 b1|b5 ...
    output 1    b0 b1 b2 b3 ...   1: a4 a5 a6 a7 b4 b5 b6 b7 ...     (lower half | upper half of each byte)

The scales and minima of the group follow in lines of their own, except for int8 with one scale per output. The number
of outputs is padded to a multiple of 32. Without a kernel, a layer converts its weight to floating point in each step.
"""

from collections.abc import Callable, Iterable, Sequence
from enum import IntEnum
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .llama import LlamaForCausalLM

GROUP = 32  # numbers of a row in a group, which share a scale and a minimum in int4, and a scale in a kernel's input
COLUMN = 16  # outputs in a column
PAD_TO = 32  # the number of outputs is padded to a multiple of this, because a kernel computes 32 at a time
NUMBERS_AT_A_TIME = 1 << 20  # numbers that are quantized or stored at a time
LOW_HALVES = 0x0F0F0F0F  # mask for the low 4 bits of four bytes


class Format(IntEnum):
    """The layout of a weight. The value is the number of lines per group: 4 or 8 of integers, then those of scales."""

    INT4 = 5  # one line of bfloat16 scales and minima
    INT4_FLOAT32 = 6  # one line of float32 scales, and one of float32 minima
    INT8 = 8  # no line: a float32 scale per output is stored separately
    INT8_GROUPS = 9  # one line of float32 scales
    INT8_HALF_GROUPS = 10  # two lines of float32 scales, one for each half of the group
    INT8_MINIMA = 12  # two lines of scales and two of minima, which can represent the numbers of every other format

    @property
    def bits(self) -> int:
        """Return the number of bits of each integer."""
        return 4 if self <= Format.INT4_FLOAT32 else 8

    @property
    def has_minima(self) -> bool:
        """Return whether numbers are scale * q + minimum."""
        return self.bits == 4 or self == Format.INT8_MINIMA


class Integers(NamedTuple):
    """The numbers of a quantized weight: q uint8 [outputs, size]; scales and minima float32 [outputs, groups].

    A row's groups are of equal size, which may be other than 32. With minima, a number is scale * q + minimum, and
    otherwise scale * (q - 128).
    """

    q: Tensor
    scales: Tensor
    minima: Tensor | None = None


def rows_at_a_time(size: int) -> int:
    """Return how many rows of a weight, with `size` numbers each, are quantized or stored at a time."""
    return max(1, NUMBERS_AT_A_TIME // size // PAD_TO) * PAD_TO


class QuantizedLinear(nn.Module):
    """A linear layer with a weight in 8 or 4 bits."""

    def __init__(self, linear: nn.Linear, format: Format) -> None:
        """Allocate the weight on the layer's device. Raise ValueError if 32 does not divide `in_features`."""
        super().__init__()
        outputs, size = linear.out_features, linear.in_features
        if size % GROUP:
            raise ValueError(f"a weight of {outputs} x {size} cannot be quantized: {size} is not a multiple of {GROUP}")
        self.out_features, self.in_features, self.format = outputs, size, format
        columns, device = -(-outputs // PAD_TO) * PAD_TO // COLUMN, linear.weight.device
        values = torch.zeros(columns, size // GROUP * format, COLUMN, 4, dtype=torch.uint8, device=device)
        scales = torch.zeros(columns if format == Format.INT8 else 0, COLUMN, dtype=torch.int32, device=device)
        self.values = nn.Parameter(values, requires_grad=False)
        self.scales = nn.Parameter(scales, requires_grad=False)  # float32 bits, as model.to() would convert float32
        self.bias = linear.bias
        self.keeps_wide = False
        self._wide: Tensor | None = None  # the weight in floating point

    def keep_wide(self, keeps_wide: bool) -> None:
        """Keep the weight in floating point from its first use on, or drop it: it makes plain operations fast."""
        self.keeps_wide = keeps_wide
        self._wide = self._wide if keeps_wide else None

    def quantize(self, parts: Sequence[Tensor]) -> None:
        """Quantize and store a floating-point weight: `parts` [rows, in_features], stacked along dimension 0."""
        for start in range(0, self.out_features, step := rows_at_a_time(self.in_features)):
            rows = rows_between(parts, start, min(start + step, self.out_features)).to(self.values.device).float()
            self._store(start, quantize_int4(rows) if self.format.bits == 4 else quantize_int8(rows))

    def store(self, parts: Iterable[Integers]) -> None:
        """Store a quantized weight: `parts`, stacked along dimension 0. The format must be able to represent them."""
        first_row = 0
        for part in parts:
            assert first_row % COLUMN == 0, f"a part begins at row {first_row}"
            for start in range(0, len(part.q), step := rows_at_a_time(self.in_features)):
                rows = slice(start, start + step)
                minima = None if part.minima is None else part.minima[rows]
                self._store(first_row + start, Integers(part.q[rows], part.scales[rows], minima))
            first_row += len(part.q)

    def _store(self, start: int, integers: Integers) -> None:
        """Store consecutive rows of the weight from row `start`, a multiple of 16. The last column may be partial."""
        words = pack_lines(integers, self.format)  # [num_rows, groups, lines]
        padding, columns = -len(words) % COLUMN, slice(start // COLUMN, -(-(start + len(words)) // COLUMN))
        lines = F.pad(words.flatten(1), (0, 0, 0, padding)).unflatten(0, (-1, COLUMN))
        self.values[columns].view(torch.int32)[..., 0] = lines.transpose(1, 2)
        if self.format == Format.INT8:
            scales = F.pad(integers.scales.flatten(), (0, padding)).view(torch.int32)
            self.scales[columns] = scales.view(-1, COLUMN)

    def dequantize(self) -> Tensor:
        """Return the weight, float32 [out_features, in_features]."""
        return self.dequantize_rows(torch.arange(self.out_features, device=self.values.device))

    def dequantize_rows(self, indices: Tensor) -> Tensor:
        """Return the rows of the weight at int64 `indices`, as float32 [len(indices), in_features]."""
        column, offset = indices // COLUMN, indices % COLUMN
        words = self.values.detach().view(torch.int32)[..., 0]  # [columns, lines of all groups, 16]
        lines = words[column, :, offset].unflatten(1, (-1, self.format))  # [len(indices), groups, lines]
        scales = self.scales.detach()[column, offset].view(torch.float32) if self.format == Format.INT8 else None
        return unpack_lines(lines, self.format, scales)

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's output [num_rows, out_features] for x [num_rows, in_features]."""
        weight = self.dequantize().to(x.dtype) if self._wide is None else self._wide
        if self.keeps_wide:
            self._wide = weight
        return F.linear(x, weight, self.bias)


class QuantizedEmbedding(nn.Module):
    """An embedding that shares the weight of a quantized head."""

    def __init__(self, head: QuantizedLinear, dtype: torch.dtype) -> None:
        super().__init__()
        self.head, self._dtype = head, dtype

    def forward(self, input_ids: Tensor) -> Tensor:
        """Return the embeddings [num_tokens, size] of `input_ids`, int64 [num_tokens]."""
        return self.head.dequantize_rows(input_ids).to(self._dtype)


def keep_wide(model: nn.Module, num_bytes: int, dtype: torch.dtype) -> None:
    """Let quantized layers keep weights in `dtype`, too, as far as `num_bytes` allow. With 0, drop all of them."""
    for layer in model.modules():
        if isinstance(layer, QuantizedLinear):
            size = layer.out_features * layer.in_features * dtype.itemsize
            layer.keep_wide(size <= num_bytes)
            num_bytes -= size if layer.keeps_wide else 0


def format_at_load(quantization: str) -> Callable[[str], Format]:
    """Return a function that maps a layer's name to its format, when a floating-point model is quantized at load."""
    layer_format = {"int8": Format.INT8, "int4": Format.INT4}[quantization]
    return lambda name: Format.INT8 if name == "lm_head" else layer_format


def quantize_layers(model: LlamaForCausalLM, format_of: Callable[[str], Format | None], dtype: torch.dtype) -> None:
    """Replace the linear layers to which `format_of` gives a format, and an embedding tied to a quantized head.

    `format_of` gets a layer's name. The new layers do not have the weights yet: load those later.
    """
    for parent_name, parent in list(model.named_modules()):
        for name, layer in list(parent.named_children()):
            if isinstance(layer, nn.Linear) and (format := format_of(f"{parent_name}.{name}".lstrip("."))):
                parent.register_module(name, QuantizedLinear(layer, format))
    head: nn.Module = model.lm_head
    if model.config.tie_word_embeddings and isinstance(head, QuantizedLinear):
        model.model.register_module("embed_tokens", QuantizedEmbedding(head, dtype))


def rows_between(parts: Sequence[Tensor], start: int, end: int) -> Tensor:
    """Return rows start to end - 1 of parts that are stacked along dimension 0."""
    slices, first_row = [], 0
    for part in parts:
        slices.append(part[max(0, start - first_row) : max(0, end - first_row)])
        first_row += len(part)
    return torch.cat(slices)


def quantize_int8(rows: Tensor) -> Integers:
    """Quantize rows [num_rows, size] to 8 bits, with a scale for each row."""
    scales = rows.abs().amax(1, keepdim=True) / 127
    q = (rows / nonzero_scales(scales)).round_().clamp_(-127, 127).add_(128)
    return Integers(q.to(torch.uint8), scales)


def quantize_int4(rows: Tensor) -> Integers:
    """Quantize rows [num_rows, size] to 4 bits, with a bfloat16 scale and minimum for each group of 32 numbers."""
    groups = rows.unflatten(1, (-1, GROUP))  # [num_rows, groups, 32]
    lowest, highest = groups.aminmax(dim=2)  # [num_rows, groups]
    minima = lowest.to(torch.bfloat16).float()
    scales = ((highest - minima) / 15).to(torch.bfloat16).float()
    q = (groups - minima[..., None]).div_(nonzero_scales(scales)[..., None]).round_().clamp_(0, 15)
    return Integers(q.to(torch.uint8).flatten(1), scales, minima)


def nonzero_scales(scales: Tensor) -> Tensor:
    """Return the scales as divisors: 1 in place of 0, which is the scale of numbers that are all equal."""
    return torch.where(scales == 0, 1, scales)


def floats_of(integers: Integers) -> Tensor:
    """Return the weight that the integers represent, float32 [outputs, size]."""
    q, scales, minima = integers
    groups = q.float().unflatten(1, (scales.shape[1], -1))
    scale = scales[..., None]
    result: Tensor = (groups - 128) * scale if minima is None else groups * scale + minima[..., None]
    return result.flatten(1)


def pack_lines(integers: Integers, format: Format) -> Tensor:
    """Return the lines of integers, scales and minima: int32 [outputs, groups, lines per group].

    An int32 holds an output's four bytes of a line.
    """
    q, scales, minima = integers
    if format == Format.INT8_MINIMA and minima is not None:
        q = q + 128
    words: Tensor = q.contiguous().view(torch.int32).unflatten(1, (-1, GROUP // 4))  # [outputs, groups, 8]
    if format == Format.INT8:
        return words
    repeats = words.shape[1] * (2 if format >= Format.INT8_HALF_GROUPS else 1) // scales.shape[1]
    params = scales.repeat_interleave(repeats, 1).unflatten(
        1, (words.shape[1], -1)
    )  # [outputs, groups, scales of a group]
    if format.has_minima:
        lowest = torch.zeros_like(scales) if minima is None else minima
        params = torch.cat((params, lowest.repeat_interleave(repeats, 1).view_as(params)), 2)
    if format.bits == 4:
        words = words[..., 0::2] | words[..., 1::2] << 4
    return torch.cat((words, (params.to(torch.bfloat16) if format == Format.INT4 else params).view(torch.int32)), 2)


def unpack_lines(lines: Tensor, format: Format, scales: Tensor | None) -> Tensor:
    """Return rows of a weight, float32 [num_rows, size], from their lines, as pack_lines() returns them.

    `scales` [num_rows] are needed only for INT8, which has none in the lines.
    """
    words, params = lines.split((format.bits, format - format.bits), 2)  # 4-bit integers take 4 lines, and 8-bit ones 8
    if format.bits == 4:
        words = torch.stack((words & LOW_HALVES, words >> 4 & LOW_HALVES), 3).flatten(2)
    q = words.contiguous().view(torch.uint8).float()  # [num_rows, groups, 32]
    if format.bits == 4:
        pairs = params.contiguous().view(torch.bfloat16 if format == Format.INT4 else torch.float32).float()
        scale, minimum = pairs.unsqueeze(2).unbind(3)  # [num_rows, groups, 1]
        weight: Tensor = q * scale + minimum
        return weight.flatten(1)
    scale = params.contiguous().view(torch.float32) if scales is None else scales[:, None, None]
    scale, *minima = scale.chunk(2 if format.has_minima else 1, 2)
    parts = (q - 128).unflatten(2, (scale.shape[2], -1))  # [num_rows, groups, scales per group, numbers]
    weight = parts * scale[..., None]
    return (weight + minima[0][..., None] if minima else weight).flatten(1)
