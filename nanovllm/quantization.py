"""Weights in 8 or 4 bits. A step of few rows spends its time reading weights, so fewer bytes make it faster.

    int8   weight = scale * (q - 128)        q from 1 to 255; a scale per output
    int4   weight = scale * q + minimum      q from 0 to 15; a scale and a minimum per 32 numbers; the head is in int8

The integers lie in the order in which CPU kernels read them, four of an output side by side, for 16 outputs:

    weight [outputs, size]      int8 [outputs / 16, size / 4, 16, 4]     int4 [outputs / 16, 5 * size / 32, 16, 4]
    row 0    a0 a1 a2 a3 ...    a0 a1 a2 a3 b0 b1 b2 b3 ...              a0|a4 a1|a5 a2|a6 a3|a7 b0|b4 ...
    row 1    b0 b1 b2 b3 ...    a4 a5 a6 a7 b4 b5 b6 b7 ...              lower half | upper half of a byte

In int4, the scales and minima of 16 outputs follow their 32 numbers, so that a kernel reads one stream. Rows are padded
with zeros to a multiple of 32. Plain operations turn a weight back into floating point to use it.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .llama import LlamaForCausalLM

BITS = {"int8": 8, "int4": 4}  # of the layers' weights
GROUP = 32  # numbers of a row that share a scale and a minimum in int4, and a scale in a kernel's x
COLUMN = 16  # outputs side by side
PADDED = 32  # outputs that a kernel computes at a time
SCALE = torch.bfloat16  # the type of scales and minima; parameters hold its bits, which model.to() leaves alone
AT_A_TIME = 1 << 20  # numbers that are quantized at a time


class QuantizedLinear(nn.Module):
    """A linear layer with a weight in 8 or 4 bits."""

    def __init__(self, linear: nn.Linear, bits: int) -> None:
        """Make room on the layer's device. Raise ValueError if 32 does not divide `in_features`."""
        super().__init__()
        outputs, size = linear.out_features, linear.in_features
        if size % GROUP:
            raise ValueError(f"a weight of {outputs} x {size} cannot be quantized: its rows need a multiple of {GROUP}")
        self.out_features, self.in_features, self.bits = outputs, size, bits
        columns, fours = -(-outputs // PADDED) * PADDED // COLUMN, size // 4 if bits == 8 else size // GROUP * 5

        def parameter(*shape: int, dtype: torch.dtype) -> nn.Parameter:
            return nn.Parameter(torch.zeros(shape, dtype=dtype, device=linear.weight.device), requires_grad=False)

        self.values = parameter(columns, fours, COLUMN, 4, dtype=torch.uint8)
        self.scales = parameter(columns if bits == 8 else 0, COLUMN, dtype=torch.int16)
        self.bias = linear.bias

    def quantize(self, parts: Sequence[Tensor]) -> None:
        """Set the weight to these parts [rows, in_features], one below the other, some rows at a time."""
        step = max(1, AT_A_TIME // self.in_features // PADDED) * PADDED
        for start in range(0, self.out_features, step):
            rows = rows_between(parts, start, min(start + step, self.out_features)).to(self.values.device).float()
            rows = F.pad(rows, (0, 0, 0, -len(rows) % PADDED))
            q, scales = quantize_int4(rows) if self.bits == 4 else quantize_int8(rows)
            columns = slice(start // COLUMN, (start + len(rows)) // COLUMN)
            fours = q.view(torch.int32).unflatten(0, (-1, COLUMN))  # [columns, 16, size / 4], four numbers each
            words = self.values[columns].view(torch.int32)[..., 0]
            if self.bits == 8:
                words.copy_(fours.transpose(1, 2))
                self.scales[columns] = scales.view(torch.int16).view(-1, COLUMN)
                continue
            halves = (fours[..., 0::2] | fours[..., 1::2] << 4).transpose(1, 2)  # [columns, size / 8, 16]
            words.unflatten(1, (-1, 5))[:, :, :4] = halves.unflatten(1, (-1, 4))
            of_groups = (
                scales.view(torch.int16).unflatten(0, (-1, COLUMN)).permute(0, 2, 3, 1)
            )  # [columns, groups, 2, 16]
            self._scales_of_groups()[columns] = of_groups

    def _scales_of_groups(self) -> Tensor:
        """Return a view of the scales and minima in int4: int16 [columns, groups, 2, 16]."""
        groups: Tensor = self.values.unflatten(1, (-1, 5))[:, :, 4]  # [columns, groups, 16, 4]
        scales: Tensor = groups.flatten(2).view(torch.int16).unflatten(2, (2, COLUMN))
        return scales

    def dequantize(self) -> Tensor:
        """Return the weight, float32 [out_features, in_features]."""
        values = self.values.detach()
        if self.bits == 4:
            values = values.unflatten(1, (-1, 5))[:, :, :4].flatten(1, 2)  # [columns, size / 8, 16, 4]
            values = torch.stack((values & 15, values >> 4), dim=2).flatten(1, 2)
        q = values.transpose(1, 2).flatten(2).flatten(0, 1).float()  # [padded, in_features]
        if self.bits == 8:
            weight = (q - 128) * self.scales.view(SCALE).float().flatten()[:, None]
        else:
            of_groups = self._scales_of_groups().view(SCALE).float()
            scale, minimum = of_groups.permute(2, 0, 3, 1).flatten(1, 2).repeat_interleave(GROUP, dim=2).unbind(0)
            weight = q * scale + minimum
        return weight[: self.out_features]

    def rows(self, numbers: Tensor) -> Tensor:
        """Return rows of an int8 weight, float32 [len(numbers), in_features]: `numbers` is int64."""
        values = self.values[numbers // COLUMN, :, numbers % COLUMN].flatten(1).float()
        return (values - 128) * self.scales.view(SCALE).flatten()[numbers].float()[:, None]

    def forward(self, x: Tensor) -> Tensor:
        """Return x [num_rows, in_features] times the weight: [num_rows, out_features]."""
        return F.linear(x, self.dequantize().to(x.dtype), self.bias)


class QuantizedEmbedding(nn.Module):
    """An embedding that is tied to a quantized head."""

    def __init__(self, head: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        assert isinstance(head, QuantizedLinear)
        self.head, self._dtype = head, dtype

    def forward(self, input_ids: Tensor) -> Tensor:
        """Return the embeddings [num_tokens, size] of `input_ids`, int64 [num_tokens]."""
        return self.head.rows(input_ids).to(self._dtype)


def quantize_layers(model: LlamaForCausalLM, quantization: str, dtype: torch.dtype) -> None:
    """Replace all linear layers of a model without weights, and an embedding that is tied to the head."""
    bits = BITS[quantization]
    for parent in list(model.modules()):
        for name, layer in list(parent.named_children()):
            if isinstance(layer, nn.Linear):
                parent.register_module(name, QuantizedLinear(layer, 8 if layer is model.lm_head else bits))
    if model.config.tie_word_embeddings:
        model.model.register_module("embed_tokens", QuantizedEmbedding(model.lm_head, dtype))


def rows_between(parts: Sequence[Tensor], start: int, end: int) -> Tensor:
    """Return rows start to end - 1 of parts that lie one below the other."""
    found, first = [], 0
    for part in parts:
        found.append(part[max(0, start - first) : max(0, end - first)])
        first += len(part)
    return torch.cat(found)


def quantize_int8(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return q uint8 [num_rows, size], and scales bfloat16 [num_rows, 1]."""
    scales = (rows.abs().amax(1, keepdim=True) / 127).to(SCALE)
    q = (rows / divisor(scales)).round_().clamp_(-127, 127).add_(128)
    return q.to(torch.uint8), scales


def quantize_int4(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return q uint8 [num_rows, size], and scales and minima, bfloat16 [num_rows, groups, 2]."""
    groups = rows.unflatten(1, (-1, GROUP))  # [num_rows, groups, 32]
    lowest, highest = groups.aminmax(dim=2, keepdim=True)  # [num_rows, groups, 1]
    minima = lowest.to(SCALE)
    scales = ((highest - minima.float()) / 15).to(SCALE)
    q = (groups - minima.float()).div_(divisor(scales)).round_().clamp_(0, 15)
    return q.to(torch.uint8).flatten(1), torch.cat((scales, minima), dim=2)


def divisor(scales: Tensor) -> Tensor:
    """Return float32 scales to divide by: a group of equal numbers has scale 0."""
    scales = scales.float()
    return torch.where(scales == 0, 1, scales)
