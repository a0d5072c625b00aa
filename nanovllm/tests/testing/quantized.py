"""Linear layers with random integers, in any format."""

import torch
from torch import nn

from ...quantization import GROUP, Format, Integers, QuantizedLinear


def random_integers(outputs: int, size: int, format: Format) -> Integers:
    highest = {4: 15, 8: 31 if format.has_minima else 255}[format.bits]
    q = torch.randint(highest + 1, (outputs, size), dtype=torch.uint8)
    groups = {Format.INT8: 1}.get(format, size // (16 if format >= Format.INT8_HALF_GROUPS else GROUP))
    scales, minima = torch.rand(outputs, groups) / 16, torch.randn(outputs, groups)
    if format == Format.INT4:
        scales, minima = scales.bfloat16().float(), minima.bfloat16().float()
    return Integers(q, scales, minima if format.has_minima else None)


def stored_linear(integers: Integers, format: Format, bias: bool = False) -> QuantizedLinear:
    layer = QuantizedLinear(nn.Linear(*integers.q.shape[::-1], bias=bias).requires_grad_(False), format)
    layer.store([integers])
    return layer
