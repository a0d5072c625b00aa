"""gemm compared with its plain version, and engines whose linear layers it computes."""

from pathlib import Path
from typing import Any

import pytest
import torch

from ...backends.gpu import plain
from ...backends.gpu.ops import triton_ops
from ...backends.gpu.tiles import HEIGHTS, ROW_TILES, choose_height
from ...quantization import Format
from ..testing.checkpoints import write_checkpoint
from ..testing.quantized import random_integers, stored_linear
from .pools import DTYPES, TOLERANCE
from .test_backend import PARAMS, FakeCapture, make_llm, outputs_of, use_kernels


def check_gemm(layer: Any, dtype: torch.dtype, rows: int, device: str) -> None:
    x = torch.randn(rows, layer.in_features, device=device).to(dtype)
    outs = [torch.full((rows, layer.out_features), torch.nan, device=device, dtype=dtype) for _ in range(2)]
    for run, out in zip((triton_ops().gemm, plain.gemm), outs, strict=True):
        run(x, layer, out)
    largest = float(outs[1].abs().max())
    torch.testing.assert_close(*outs, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype] * largest)


@torch.inference_mode()
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("outputs", "size", "has_bias"), [(70, 300, True), (16, 20, False)])  # no tile divides these
def test_numbers_are_multiplied_as_in_plain_torch(
    outputs: int, size: int, has_bias: bool, dtype: torch.dtype, device: str
) -> None:
    torch.manual_seed(size)
    layer = torch.nn.Linear(size, outputs, has_bias, device, dtype)
    for rows in (2, 16, 31, 64, 70):
        check_gemm(layer, dtype, rows, device)


@torch.inference_mode()
@pytest.mark.parametrize("height", HEIGHTS)
def test_height_of_a_program_does_not_change_the_product(
    height: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nanovllm.backends.gpu.gemm_kernels.choose_height", lambda *_: height)
    torch.manual_seed(0)
    check_gemm(torch.nn.Linear(70, 100, device=device), torch.float32, 20, device)


@pytest.mark.parametrize("format", Format)
@pytest.mark.parametrize(("outputs", "size", "has_bias"), [(70, 160, True), (16, 32, False)])  # no tile divides these
def test_integers_are_multiplied_as_in_plain_torch(
    format: Format, outputs: int, size: int, has_bias: bool, device: str
) -> None:
    torch.manual_seed(int(format))
    layer = stored_linear(random_integers(outputs, size, format), format, has_bias).to(device)
    for number, rows in enumerate((1, 3, 16, 70)):
        dtype = DTYPES[(number + format) % 3]
        layer.bias = layer.bias if layer.bias is None else torch.nn.Parameter(layer.bias.to(dtype), False)
        check_gemm(layer, dtype, rows, device)


def test_tiles_are_in_order_and_the_engine_compiles_every_height_that_requests_need() -> None:
    assert tuple(sorted(ROW_TILES)) == ROW_TILES and ROW_TILES[0] == 1
    assert tuple(sorted(HEIGHTS, reverse=True)) == HEIGHTS and choose_height(1, ROW_TILES[-1], True) == HEIGHTS[0]


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_tokens_match_plain_operations_on_the_same_weights(quantization: str, tmp_path: Path) -> None:
    """Prompts, decodes in graphs, and a head and an embedding that share a quantized weight."""
    write_checkpoint(tmp_path, hidden_size=64, intermediate_size=96, tie_word_embeddings=True)
    plain_llm, fast = (make_llm(tmp_path, quantization=quantization) for _ in range(2))
    use_kernels(fast, FakeCapture(), timer=lambda step: 1.0)
    for params in ("greedy", "seeded"):
        assert outputs_of(fast, PARAMS[params]) == outputs_of(plain_llm, PARAMS[params])
