"""gemv beside its twin: one to four rows, sizes and outputs that no tile divides, with a bias and without."""

import pytest
import torch

from ...backends.gpu import plain
from .pools import TOLERANCE

gemv = pytest.importorskip("nanovllm.backends.gpu.gemv", reason="needs triton: make test-triton")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("rows", "size", "outputs", "height", "has_bias"),  # height: a program's outputs
    [(1, 16, 5, 1, True), (2, 576, 37, 8, False), (3, 5000, 6, 2, True), (4, 70, 41, 4, True)],
)
def test_as_its_twin(
    rows: int,
    size: int,
    outputs: int,
    height: int,
    has_bias: bool,
    dtype: torch.dtype,
    device: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gemv, "outputs_of_program", lambda _: height)
    generator = torch.Generator().manual_seed(size)
    x = torch.randn(rows, size, generator=generator).to(device, dtype)
    weight = (torch.randn(outputs, size, generator=generator) / size**0.5).to(device, dtype)
    bias = torch.randn(outputs, generator=generator).to(device, dtype) if has_bias else None
    outs = [torch.full((rows, outputs), torch.nan, device=device, dtype=dtype) for _ in range(2)]
    for run, out in zip((gemv.gemv, plain.gemv), outs, strict=True):
        run(x, weight, bias, out)
    torch.testing.assert_close(*outs, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("size", "outputs", "height", "has_bias"), [(16, 5, 1, True), (576, 37, 8, False), (5000, 6, 2, True)]
)
def test_a_gate_and_what_it_gates(
    size: int, outputs: int, height: int, has_bias: bool, dtype: torch.dtype, device: str, monkeypatch
) -> None:
    monkeypatch.setattr(gemv, "outputs_of_program", lambda _: height)
    generator = torch.Generator().manual_seed(size)
    x = torch.randn(1, size, generator=generator).to(device, dtype)
    weight = (torch.randn(2 * outputs, size, generator=generator) / size**0.5).to(device, dtype)
    bias = torch.randn(2 * outputs, generator=generator).to(device, dtype) if has_bias else None
    outs = [torch.full((1, outputs), torch.nan, device=device, dtype=dtype) for _ in range(2)]
    for run, out in zip((gemv.gated_gemv, plain.gated_gemv), outs, strict=True):
        run(x, weight, bias, out)
    torch.testing.assert_close(*outs, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def test_more_rows_are_refused(device: str) -> None:
    x, weight = torch.zeros(5, 16, device=device), torch.zeros(8, 16, device=device)
    with pytest.raises(AssertionError, match="5 rows, at most 4"):
        gemv.gemv(x, weight, None, torch.empty(5, 8, device=device))
