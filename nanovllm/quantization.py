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
and minima, 16 at a time, in the types that Format names: after each group, or in the K formats after 8 of them. The
number of outputs is padded to a multiple of 32. Without a kernel, a layer converts its weight to floating point in each
step.
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
    """The layout of a weight: bits of an integer, lines of a block, and scales and minima of a group.

    A block is one group, or 8 groups in the K formats, which are those of GGUF's K types. There, scales and minima are
    integers of 8 bits, and float16 factors multiply those of a block.
    """

    bits: int
    lines: int
    parts: int  # scales of a group, and minima if it has any
    has_minima: bool
    dtype: torch.dtype  # of scales and minima
    groups: int  # of a block
    zero_point: int  # the integer that stands for 0, or for the minimum

    INT4 = 4, 5, 1, True, torch.float16  # a line of 16 scales and 16 minima
    INT5 = 5, 6, 1, True, torch.float16  # the same
    INT4_FLOAT32 = 4, 6, 1, True, torch.float32  # a line of scales, and one of minima
    INT4_K = 4, 37, 1, True, torch.int8  # four lines of scales and minima, group by group, and one of factors for both
    INT5_K = 5, 45, 1, True, torch.int8  # the same
    INT4_HALVES_K = 4, 41, 2, True, torch.int8  # the same for halves of groups, so eight lines of scales and minima
    INT6_K = 6, 53, 2, False, torch.int8  # four lines of scales for halves, and one of factors, each twice
    INT8 = 8, 8, 1, False, torch.float32  # no line: a scale per output is stored separately
    INT8_GROUPS = 8, 9, 1, False, torch.float32  # a line of scales

    def __new__(cls, bits: int, lines: int, parts: int, has_minima: bool, dtype: torch.dtype) -> "Format":
        """Make a format, with the next number."""
        format = int.__new__(cls, len(cls.__members__) + 1)
        format._value_ = int(format)
        format.bits, format.lines, format.parts, format.has_minima, format.dtype = bits, lines, parts, has_minima, dtype
        format.groups = SHARED // GROUP if dtype == torch.int8 else 1
        format.zero_point = 0 if has_minima else 1 << bits - 1
        return format


LINES = 0, *(each.lines for each in Format)  # per block, by Format, for kernels; 0: the weight is not quantized
BLOCKS = 0, *(each.groups * GROUP for each in Format)  # numbers of a row in a block, likewise


Formats = Sequence[tuple[int, Format]]  # outputs and format of each weight that a layer stacks


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

    def floats(self) -> Tensor:
        """Return the numbers, float32 [outputs, size]. There must be no factors."""
        groups, scale = self.q.float().unflatten(1, (self.scales.shape[1], -1)), self.scales[..., None]
        result: Tensor = (groups - 128) * scale if self.minima is None else groups * scale + self.minima[..., None]
        return result.flatten(1)


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
        blocks = size // GROUP // format.groups
        values = torch.zeros(columns, blocks, format.lines, LINE, dtype=torch.uint8, device=device)
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
        padding = 0, 0, 0, -len(integers.q) % COLUMN
        whole = integers.map(lambda rows: F.pad(rows, padding)) if any(padding) else integers
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

        def of_rows(dtype: torch.dtype, some: slice) -> Tensor:
            """Return the numbers of some lines of each block: [len(indices), blocks, numbers]."""
            all_rows: Tensor = lines[:, :, some].view(dtype).unflatten(3, (-1, COLUMN))
            return all_rows[column, :, :, :, offset].flatten(2)

        q = unpack_integers(of_rows(torch.int32, slice(self.format.groups * self.format.bits)), self.format)
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


class MixedLinear(nn.Module):
    """A linear layer that stacks weights in several formats, such as those of queries, keys and values."""

    def __init__(self, linear: nn.Linear, formats: Formats) -> None:
        """Allocate the weights on the layer's device. Raise ValueError if 32 does not divide `in_features`."""
        super().__init__()
        self.in_features, self.out_features, self.bias = linear.in_features, linear.out_features, linear.bias
        part_of = partial(nn.Linear, linear.in_features, bias=False, device=linear.weight.device)
        self.parts = nn.ModuleList(QuantizedLinear(part_of(rows), format) for rows, format in formats)

    def forward(self, x: Tensor, multiply: Callable[[nn.Module, Tensor], Tensor] = nn.Module.__call__) -> Tensor:
        """Return the layer's output [num_rows, out_features] for x [num_rows, in_features].

        multiply(part, x) computes the output of each part.
        """
        out = torch.cat([multiply(part, x) for part in self.parts], 1)
        return out if self.bias is None else out + self.bias


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
    return lambda name: Format.INT8 if name == "lm_head" else Format[quantization.upper()]


def quantize_layers(
    model: LlamaForCausalLM, formats_of: Callable[[str], Format | Formats | None], dtype: torch.dtype
) -> None:
    """Replace the linear layers to which `formats_of` gives a format, and an embedding tied to a quantized head.

    `formats_of` gets a layer's name. The new layers do not have the weights yet: load those later.
    """
    for parent_name, parent in list(model.named_modules()):
        for name, layer in list(parent.named_children()):
            if isinstance(layer, nn.Linear) and (formats := formats_of(f"{parent_name}.{name}".lstrip("."))):
                if isinstance(formats, Format):
                    parent.register_module(name, QuantizedLinear(layer, formats))
                else:
                    parent.register_module(name, MixedLinear(layer, formats))
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


def in_columns(rows: Tensor) -> Tensor:
    """Return rows [n, size], whose number 16 divides, as [columns, size, 16]."""
    columns: Tensor = rows.unflatten(0, (-1, COLUMN))
    return columns.mT


def pack_lines(integers: Integers, format: Format) -> Tensor:
    """Return the lines of a weight's rows, whose number 16 divides: uint8 [columns, blocks, lines per block, 64]."""
    q, scales, minima, factors = integers
    q = q if format.has_minima else q + (format.zero_point - 128) % 256
    words = in_columns(q.contiguous().view(torch.int32)).unflatten(1, (-1, GROUP // 4))  # [columns, groups, 8, 16]
    groups, parts, of_group = words.shape[1], format.parts, [words]
    if format.bits < 8:
        lower = words & LOW_HALVES
        of_group = [lower[:, :, 0::2] | lower[:, :, 1::2] << 4]
    if format.bits in UPPER_BITS:
        upper = (words >> 4 & UPPER_BITS[format.bits]).unflatten(2, (format.bits - 4, -1))
        of_group.append((upper << upper_shifts(upper)[:, None]).sum(3, dtype=torch.int32))
    fields = [torch.cat(of_group, 2)]  # [columns, groups, bits, 16]
    if format != Format.INT8:
        params = torch.stack([each for each in (scales, minima) if each is not None], 1).to(format.dtype)
        each_part = params.repeat_interleave(groups * parts // params.shape[2], 2).unflatten(2, (groups, parts))
        fields.append(in_columns(each_part.transpose(1, 2).flatten(1)).unflatten(1, (groups, -1)))
    if factors is not None:
        fields.append(in_columns(factors.to(torch.float16).repeat_interleave(1 if format.has_minima else 2, 1)))
    as_bytes = [each.contiguous().view(torch.uint8).view(len(words), groups // format.groups, -1) for each in fields]
    lines: Tensor = torch.cat(as_bytes, 2).unflatten(2, (format.lines, LINE))
    return lines


def upper_shifts(upper: Tensor) -> Tensor:
    """Return the shift of each word in a line of upper bits: upper [columns or rows, groups, lines, words].

    There are as many lines as a number has upper bits.
    """
    return torch.arange(upper.shape[3], device=upper.device) * upper.shape[2]


def unpack_integers(words: Tensor, format: Format) -> Tensor:
    """Return the integers of rows, float32 [rows, groups, 32], from the words of their lines [rows, blocks, lines]."""
    bits = format.bits
    words = words.unflatten(2, (format.groups, bits)).flatten(1, 2)  # [rows, groups, bits]
    if bits < 8:
        lower, upper = words.split((4, bits - 4), 2)
        words = torch.stack((lower & LOW_HALVES, lower >> 4 & LOW_HALVES), 3).flatten(2)
        if bits in UPPER_BITS:
            each = upper[..., None].expand(-1, -1, -1, 8 // (bits - 4))
            words |= (each >> upper_shifts(each) & UPPER_BITS[bits]).flatten(2) << 4
    return words.contiguous().view(torch.uint8).float()


def unpack_params(of_rows: Callable[[torch.dtype, slice], Tensor], format: Format) -> Tensor:
    """Return the scales and then the minima of rows' groups, float32 [rows, groups, scales and minima].

    of_rows(dtype, lines) returns some lines of rows, [rows, blocks, numbers].
    """
    first = format.groups * format.bits
    if format.groups == 1:
        return of_rows(format.dtype, slice(first, None)).float()
    params, last = of_rows(format.dtype, slice(first, -1)).float(), of_rows(torch.float16, slice(-1, None)).float()
    factors = last[:, :, None, : 1 + format.has_minima, None]
    products: Tensor = params.unflatten(2, (format.groups, -1, format.parts)) * factors
    return products.flatten(3).flatten(1, 2)
