"""Linear layers with random integers, in any format."""

import torch
from torch import Tensor, nn

from ...quantization import GROUP, SHARED, Format, Integers, QuantizedLinear


def random_integers(outputs: int, size: int, format: Format) -> Integers:
    """Return random numbers that a format can represent. For a K format, rows are 8 times as long as `size`."""
    size *= format.groups
    q = torch.randint(1 << format.bits, (outputs, size), dtype=torch.uint8)
    q += 0 if format.has_minima else 128 - format.zero_point
    groups = 1 if format == Format.INT8 else size // GROUP * format.parts
    if format.groups > 1:
        scales, minima = (torch.randint(64, (outputs, groups), dtype=torch.uint8) for _ in range(2))
        factors = (torch.randn(outputs, size // SHARED * (2 if format.has_minima else 1)) / 1024).half().float()
        return Integers(q, scales, minima if format.has_minima else None, factors)
    scales, minima = torch.rand(outputs, groups) / 16, torch.randn(outputs, groups)
    if format.dtype == torch.float16:
        scales, minima = scales.half().float(), minima.half().float()
    return Integers(q, scales, minima if format.has_minima else None)


def stored_linear(integers: Integers, format: Format, bias: bool = False) -> QuantizedLinear:
    layer = QuantizedLinear(nn.Linear(*integers.q.shape[::-1], bias=bias).requires_grad_(False), format)
    layer.store([integers])
    return layer


def floats_of(integers: Integers) -> Tensor:
    """Return the numbers, with factors or without: float32 [outputs, size]."""
    if integers.factors is None:
        return integers.floats()
    params = torch.stack([each for each in (integers.scales, integers.minima) if each is not None], 2)
    factors = integers.factors.unflatten(1, (-1, 1, params.shape[2]))
    products = (params.unflatten(1, (factors.shape[1], -1)) * factors).flatten(1, 2).unbind(2)
    return Integers(integers.q, *products).floats()
