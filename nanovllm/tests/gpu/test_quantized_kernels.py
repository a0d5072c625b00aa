"""quantized_gemm compared with its plain version, and engines with quantized weights."""

from pathlib import Path

import pytest
import torch

from ...backends.gpu import plain
from ...backends.gpu.ops import triton_ops
from ...backends.gpu.tiles import ROW_TILES
from ...quantization import Format
from ..testing.checkpoints import write_checkpoint
from ..testing.quantized import random_integers, stored_linear
from .pools import DTYPES, TOLERANCE
from .test_backend import PARAMS, FakeCapture, make_llm, outputs_of, use_kernels


@pytest.mark.parametrize("format", Format)
@pytest.mark.parametrize(("outputs", "size", "has_bias"), [(70, 160, True), (16, 32, False)])  # no tile divides these
def test_integers_are_multiplied_as_in_plain_torch(
    format: Format, outputs: int, size: int, has_bias: bool, device: str
) -> None:
    torch.manual_seed(int(format))
    layer = stored_linear(random_integers(outputs, size, format), format, has_bias).to(device)
    size = layer.in_features
    for number, rows in enumerate((1, 3, 16, 70)):
        dtype = DTYPES[(number + format) % 3]
        layer.bias = layer.bias if layer.bias is None else torch.nn.Parameter(layer.bias.to(dtype), False)
        x = torch.randn(rows, size, device=device).to(dtype)
        outs = [torch.full((rows, outputs), torch.nan, device=device, dtype=dtype) for _ in range(2)]
        for run, out in zip((triton_ops().quantized_gemm, plain.quantized_gemm), outs, strict=True):
            run(x, layer, out)
        largest = float(outs[1].abs().max())
        torch.testing.assert_close(*outs, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype] * largest)


def test_there_is_a_tile_for_each_number_of_rows() -> None:
    assert tuple(sorted(ROW_TILES)) == ROW_TILES and ROW_TILES[0] == 1


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_tokens_match_plain_operations_on_the_same_weights(quantization: str, tmp_path: Path) -> None:
    """Prompts, decodes in graphs, and a head and an embedding that share a quantized weight."""
    write_checkpoint(tmp_path, hidden_size=64, intermediate_size=96, tie_word_embeddings=True)
    plain_llm, fast = (make_llm(tmp_path, quantization=quantization) for _ in range(2))
    use_kernels(fast, FakeCapture(), timer=lambda step: 1.0)
    for params in ("greedy", "seeded"):
        assert outputs_of(fast, PARAMS[params]) == outputs_of(plain_llm, PARAMS[params])
