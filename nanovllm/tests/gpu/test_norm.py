"""add_rms_norm beside its twin, with a residual and without; a row at a time, or wider than a power of two."""

import pytest
import torch

from ...backends.gpu import plain
from .pools import TOLERANCE


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("rows", "size", "has_residual"), [(1, 16, True), (5, 100, False), (3, 576, True)])
def test_as_its_twin(rows: int, size: int, has_residual: bool, dtype: torch.dtype, device: str) -> None:
    from ...backends.gpu.norm import add_rms_norm

    generator = torch.Generator().manual_seed(size)
    x, residual = (torch.randn(rows, size, generator=generator).to(device, dtype) for _ in range(2))
    weight = (1 + torch.randn(size, generator=generator) / 4).to(device, dtype)
    residuals = [residual.clone() if has_residual else None for _ in range(2)]
    outs = [torch.full_like(x, torch.nan) for _ in range(2)]
    for run, sums, out in zip((add_rms_norm, plain.add_rms_norm), residuals, outs, strict=True):
        run(x, sums, weight, 1e-5, out)
    torch.testing.assert_close(*outs, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    if has_residual:
        assert torch.equal(*residuals) and not torch.equal(residuals[0], residual)


def test_in_place(device: str) -> None:
    from ...backends.gpu.norm import add_rms_norm

    x, weight = torch.randn(4, 40, device=device), torch.randn(40, device=device)
    expected = plain.rms_norm(x, weight, 1e-5)
    add_rms_norm(x, None, weight, 1e-5, x)
    torch.testing.assert_close(x, expected, rtol=2e-5, atol=2e-5)
