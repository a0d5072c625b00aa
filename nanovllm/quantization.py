"""Weights in 8 to 4 bits. A step with few tokens spends its time reading weights, so smaller weights make it faster.

    weight = scale * (q - zero point) + minimum          q from 0 to 255, 63, 31 or 15

Floating-point weights can be quantized while they load. With int8, each output has one scale. With int4, a scale and a
minimum per 32 numbers are in float16, and the model's head is quantized to int8. The other formats are for checkpoints
that are already quantized, and represent their numbers exactly.

The integers are stored in the order in which CPU kernels read them. A line of 64 bytes has four bytes of each of 16
outputs, which are called a column. For each column, a group of 32 numbers takes 8 lines in 8 bits, and 4 in 4 bits:

    weight [outputs, size]        lines in 8 bits                    lines in 4 bits
    output 0    a0 a1 a2 a3 ...   0: a0 a1 a2 a3 b0 b1 b2 b3 ...     0: a0|a4 a1|a5 a2|a6 a3|a7 b0|b4 b1|b5 ...
    output 1    b0 b1 b2 b3 ...   1: a4 a5 a6 a7 b4 b5 b6 b7 ...     (lower half | upper half of each byte)

With 5 or 6 bits, one or two lines with the upper bits follow. In 5 bits, for example, the first byte of an output has
those of a0, a4, a8, ... a28, from its lowest bit up, and the second byte those of a1, a5, a9, ... Then come the scales
and minima of the group, 16 at a time, in the types that Format names. The number of outputs is padded to a multiple of
32. Without a kernel, a layer converts its weight to floating point in each step.
"""

from collections.abc import Callable, Iterable, Sequence
from enum import IntEnum
from functools import partial
from operator import itemgetter
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .llama import LlamaForCausalLM

GROUP = 32  # numbers of a row in a group, which share a scale and a minimum in int4, and a scale in a kernel's input
SHARED = 256  # numbers of a row that share a factor in a K format
COLUMN = 16  # outputs in a column
LINE = 64  # bytes: four for each of the outputs in a column
PAD_TO = 32  # the number of outputs is padded to a multiple of this, because a kernel computes 32 at a time
NUMBERS_AT_A_TIME = 1 << 20  # numbers that are quantized or stored at a time
UPPER_BITS = {5: 0x01010101, 6: 0x03030303}  # mask for the lowest bits of four bytes, those above 4 bits
LOW_HALVES = 0x0F0F0F0F  # mask for the low 4 bits of four bytes


class Format(IntEnum):
    """The layout of a weight: bits of an integer, lines and scales per group, and whether there are minima.

    In the K formats, those of GGUF's K types, scales and minima are integers of 8 bits, and a float16 factor multiplies
    those of 256 numbers. With minima, even groups have the factors of the scales, and odd groups those of the minima.
    """

    bits: int
    lines: int
    parts: int  # scales
    has_minima: bool

    INT4 = 4, 5, 1, True  # a line of 16 scales and 16 minima in float16
    INT4_K = 4, 5, 1, True  # a line of 16 factors, 16 scales and 16 minima
    INT5_K = 5, 6, 1, True  # the same
    INT4_FLOAT32 = 4, 6, 1, True  # a line of float32 scales, and one of float32 minima
    INT6_K = 6, 7, 2, False  # a line of 16 factors, and 16 scales for each half of the group
    INT8 = 8, 8, 1, False  # no line: a float32 scale per output is stored separately
    INT8_GROUPS = 8, 9, 1, False  # a line of float32 scales
    INT8_MINIMA = 8, 12, 2, True  # float32 scales and minima per half: can hold the numbers of every other format

    def __new__(cls, bits: int, lines: int, parts: int, has_minima: bool) -> "Format":
        """Make a format, with the next number."""
        format = int.__new__(cls, len(cls.__members__) + 1)
        format._value_ = int(format)
        format.bits, format.lines, format.parts, format.has_minima = bits, lines, parts, has_minima
        return format

    @property
    def is_k(self) -> bool:
        """True for a K format."""
        return self.name.endswith("_K")

    @property
    def zero_point(self) -> int:
        """Return the integer that stands for 0, or for the minimum."""
        return {6: 32, 8: 128}.get(self.bits, 0)


LINES = 0, *(each.lines for each in Format)  # per group, by Format, for kernels; 0: the weight is not quantized


class Integers(NamedTuple):
    """The numbers of a quantized weight: q uint8 [outputs, size]; scales and minima float32 [outputs, groups].

    A row's groups are of equal size, which may be other than 32. With minima, a number is scale * q + minimum, and
    otherwise scale * (q - 128). With factors, scales and minima are integers of 8 bits, and each 256 numbers of a row
    have a float32 factor for their scales, followed by one for their minima if there are any: [outputs, factors].
    """

    q: Tensor
    scales: Tensor
    minima: Tensor | None = None
    factors: Tensor | None = None

    def map(self, function: Callable[[Tensor], Tensor]) -> "Integers":
        """Return the results of a function of each tensor."""
        more = (None if each is None else function(each) for each in (self.minima, self.factors))
        return Integers(function(self.q), function(self.scales), *more)

    def multiplied(self) -> "Integers":
        """Return the same numbers without factors."""
        if self.factors is None:
            return self
        params = torch.stack([each for each in (self.scales, self.minima) if each is not None], 2)
        factors = self.factors.unflatten(1, (-1, 1, params.shape[2]))
        products = (params.unflatten(1, (factors.shape[1], -1)) * factors).flatten(1, 2).unbind(2)
        return Integers(self.q, *products)


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
        values = torch.zeros(columns, size // GROUP, format.lines, LINE, dtype=torch.uint8, device=device)
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
                self._store(first_row + start, part.map(itemgetter(slice(start, start + step))))
            first_row += len(part.q)

    def _store(self, start: int, integers: Integers) -> None:
        """Store consecutive rows of the weight from row `start`, a multiple of 16. The last column may be partial."""
        padding = -len(integers.q) % COLUMN
        whole = integers.map(lambda rows: F.pad(rows, (0, 0, 0, padding)))
        columns = slice(start // COLUMN, (start + len(whole.q)) // COLUMN)
        self.values[columns] = pack_lines(whole, self.format)
        if self.format == Format.INT8:
            self.scales[columns] = whole.scales.view(torch.int32).view(-1, COLUMN)

    def dequantize(self) -> Tensor:
        """Return the weight, float32 [out_features, in_features]."""
        return self.dequantize_rows(torch.arange(self.out_features, device=self.values.device))

    def dequantize_rows(self, indices: Tensor) -> Tensor:
        """Return the rows of the weight at int64 `indices`, as float32 [len(indices), in_features]."""
        column, offset, lines = indices // COLUMN, indices % COLUMN, self.values.detach()

        def of_rows(dtype: torch.dtype, some: slice, numbers: slice = slice(None)) -> Tensor:
            """Return `numbers` of some lines of each group: [len(indices), groups, the row's]."""
            all_rows: Tensor = lines[:, :, some].view(dtype)[..., numbers].unflatten(3, (-1, COLUMN))
            return all_rows[column, :, :, :, offset].flatten(2)

        q = unpack_integers(partial(of_rows, torch.int32), self.format)
        if self.format == Format.INT8:
            params = self.scales.detach()[column, offset].view(torch.float32)[:, None, None]
        else:
            params = unpack_params(of_rows, self.format)
        scales, *minima = params[..., None].split(self.format.parts, 2)
        weight: Tensor = (q - self.format.zero_point).unflatten(2, (self.format.parts, -1)) * scales
        return (weight + minima[0] if minima else weight).flatten(1)

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
    """Quantize rows [num_rows, size] to 4 bits, with a float16 scale and minimum for each group of 32 numbers."""
    groups = rows.unflatten(1, (-1, GROUP))  # [num_rows, groups, 32]
    lowest, highest = groups.aminmax(dim=2)  # [num_rows, groups]
    minima = lowest.to(torch.float16).float()
    scales = ((highest - minima) / 15).to(torch.float16).float()
    q = (groups - minima[..., None]).div_(nonzero_scales(scales)[..., None]).round_().clamp_(0, 15)
    return Integers(q.to(torch.uint8).flatten(1), scales, minima)


def nonzero_scales(scales: Tensor) -> Tensor:
    """Return the scales as divisors: 1 in place of 0, which is the scale of numbers that are all equal."""
    return torch.where(scales == 0, 1, scales)


def floats_of(integers: Integers) -> Tensor:
    """Return the weight that the integers represent, float32 [outputs, size]."""
    q, scales, minima, _ = integers.multiplied()
    groups = q.float().unflatten(1, (scales.shape[1], -1))
    scale = scales[..., None]
    result: Tensor = (groups - 128) * scale if minima is None else groups * scale + minima[..., None]
    return result.flatten(1)


def in_columns(rows: Tensor) -> Tensor:
    """Return rows [n, size], whose number 16 divides, as [columns, size, 16]."""
    columns: Tensor = rows.unflatten(0, (-1, COLUMN))
    return columns.mT


def pack_lines(integers: Integers, format: Format) -> Tensor:
    """Return the lines of a weight's rows, whose number 16 divides: uint8 [columns, groups, lines per group, 64]."""
    q, scales, minima, factors = integers if format.is_k else integers.multiplied()
    q = q + (format.zero_point - (128 if minima is None else 0)) % 256
    words = in_columns(q.contiguous().view(torch.int32)).unflatten(1, (-1, GROUP // 4))  # [columns, groups, 8, 16]
    groups, parts, fields = words.shape[1], format.parts, [words]
    if format.bits < 8:
        lower = words & LOW_HALVES
        fields = [lower[:, :, 0::2] | lower[:, :, 1::2] << 4]
    if format.bits in UPPER_BITS:
        upper = (words >> 4 & UPPER_BITS[format.bits]).unflatten(2, (format.bits - 4, -1))
        fields.append((upper << upper_shifts(upper)[:, None]).sum(3, dtype=torch.int32))
    if factors is not None:  # that of the scales, and with minima the other one in odd groups
        pairs = factors.unflatten(1, (-1, 1, 1 if minima is None else 2))
        each = pairs.expand(-1, -1, SHARED // GROUP // pairs.shape[3], -1).flatten(1)  # [rows, groups]
        fields.append(in_columns(each.to(torch.float16))[:, :, None])
    if format != Format.INT8:
        if format.has_minima and minima is None:
            minima = torch.zeros_like(scales)
        dtype = torch.int8 if format.is_k else torch.float16 if format == Format.INT4 else torch.float32
        for params in (scales, *([] if minima is None else [minima])):
            repeated = params.repeat_interleave(groups * parts // params.shape[1], 1)
            fields.append(in_columns(repeated.to(dtype)).unflatten(1, (groups, -1)))
    as_bytes = [field.contiguous().view(torch.uint8).flatten(2) for field in fields]
    lines: Tensor = torch.cat(as_bytes, 2).unflatten(2, (format.lines, LINE))
    return lines


def upper_shifts(upper: Tensor) -> Tensor:
    """Return the shift of each word in a line of upper bits: upper [columns or rows, groups, lines, words].

    There are as many lines as a number has upper bits.
    """
    return torch.arange(upper.shape[3], device=upper.device) * upper.shape[2]


def unpack_integers(of_rows: Callable[[slice], Tensor], format: Format) -> Tensor:
    """Return the integers of rows, float32 [rows, groups, 32]. of_rows(lines) returns int32 [rows, groups, lines]."""
    bits = format.bits
    words = of_rows(slice(8 if bits == 8 else 4))
    if bits < 8:
        words = torch.stack((words & LOW_HALVES, words >> 4 & LOW_HALVES), 3).flatten(2)
    if bits in UPPER_BITS:
        upper = of_rows(slice(4, bits))[..., None].expand(-1, -1, -1, 8 // (bits - 4))
        words |= (upper >> upper_shifts(upper) & UPPER_BITS[bits]).flatten(2) << 4
    return words.contiguous().view(torch.uint8).float()


def unpack_params(of_rows: Callable[..., Tensor], format: Format) -> Tensor:
    """Return the scales and then the minima of rows' groups, float32 [rows, groups, scales and minima].

    of_rows(dtype, lines, numbers) returns those of some lines.
    """
    if not format.is_k:
        return of_rows(torch.float16 if format == Format.INT4 else torch.float32, slice(format.bits, None)).float()
    last = slice(format.lines - 1, None)
    factors = of_rows(torch.float16, last, slice(COLUMN)).float()  # [rows, groups, 1]
    params = of_rows(torch.int8, last, slice(2 * COLUMN, None)).float()  # [rows, groups, 2]
    if not format.has_minima:
        return params * factors
    pairs: Tensor = params.unflatten(1, (-1, 2)) * factors.unflatten(1, (-1, 2)).mT  # [rows, pairs of groups, 2, 2]
    return pairs.flatten(1, 2)
