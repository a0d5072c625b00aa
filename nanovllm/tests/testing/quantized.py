"""Linear layers with random integers, in any format."""

import torch
from torch import nn

from ...quantization import GROUP, SHARED, Format, Integers, QuantizedLinear


def random_integers(outputs: int, size: int, format: Format) -> Integers:
    """Return random numbers that a format can represent. For a K format, rows are 8 times as long as `size`."""
    size *= SHARED // GROUP if format.is_k else 1
    q = torch.randint(32 if format == Format.INT8_MINIMA else 1 << format.bits, (outputs, size), dtype=torch.uint8)
    q += 0 if format.has_minima else 128 - format.zero_point
    groups = 1 if format == Format.INT8 else size // GROUP * format.parts
    if format.is_k:
        scales, minima = (torch.randint(64, (outputs, groups), dtype=torch.uint8) for _ in range(2))
        factors = (torch.randn(outputs, size // SHARED * (2 if format.has_minima else 1)) / 1024).half().float()
        return Integers(q, scales, minima if format.has_minima else None, factors)
    scales, minima = torch.rand(outputs, groups) / 16, torch.randn(outputs, groups)
    if format == Format.INT4:
        scales, minima = scales.half().float(), minima.half().float()
    return Integers(q, scales, minima if format.has_minima else None)


def stored_linear(integers: Integers, format: Format, bias: bool = False) -> QuantizedLinear:
    layer = QuantizedLinear(nn.Linear(*integers.q.shape[::-1], bias=bias).requires_grad_(False), format)
    layer.store([integers])
    return layer
