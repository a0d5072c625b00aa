"""silu_and_mul beside its twin: rows that are a part of a program's numbers, and rows that are several programs'."""

import pytest
import torch

from ...backends.gpu import plain
from .pools import TOLERANCE


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")  # inf, as it should be
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("rows", "size"), [(1, 16), (3, 1025), (2, 2048)])
def test_as_its_twin(rows: int, size: int, dtype: torch.dtype, device: str) -> None:
    from ...backends.gpu.activation import silu_and_mul

    gate_up = torch.randn(rows, 2 * size, generator=torch.Generator().manual_seed(size)) * 4
    gate_up[0, :2] = torch.tensor([-100.0, 100.0])  # exp(100) is beyond float32's range
    gate_up = gate_up.to(device, dtype)
    outs = [torch.full((rows, size), torch.nan, device=device, dtype=dtype) for _ in range(2)]
    for run, out in zip((silu_and_mul, plain.silu_and_mul), outs, strict=True):
        run(gate_up, out)
    torch.testing.assert_close(*outs, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
