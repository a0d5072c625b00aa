"""LinearDispatch, which computes linear layers of few rows with gemv or the library's matmul, whichever is faster."""

from itertools import product

import pytest
import torch
from torch import nn

from ...backends.gpu.model import LinearDispatch, NormedLinear
from ...backends.gpu.ops import PLAIN
from ...llama.model import RMSNorm
from ...quantization import Format, MixedLinear

FORMATS = [(64, Format.INT4), (32, Format.INT8)]


class FakeTiming:
    """Kernels that record their calls, a capture() that only counts, and a timer that favors one way or the other."""

    def __init__(self, is_slow) -> None:
        self.rows: list[int] = []
        self.num_captured, self._is_slow = 0, is_slow
        self.ops = PLAIN._replace(gemv=self.gemv, gemm=self.gemm)

    def gemv(self, x, weight, bias, out):
        self.rows.append(len(x))
        PLAIN.gemv(x, weight, bias, out)

    def gemm(self, x, layer, out):
        self.rows.append(len(x))
        PLAIN.gemm(x, layer, out)

    def capture(self, step, shares_memory=True):
        assert not shares_memory, "a graph that isn't kept must not share memory"
        self.num_captured += 1
        return step

    def timer(self, step):
        before = len(self.rows)
        step()
        used = self.rows[before:]
        return 2.0 if used and self._is_slow(used[0]) else 1.0 if used else 1.5


def make_layers() -> list[nn.Linear]:
    return [nn.Linear(8, 12), nn.Linear(8, 12), nn.Linear(12, 5, bias=False)]


@torch.inference_mode()
def test_each_shape_uses_the_faster_matmul():
    timing, layers = FakeTiming(lambda rows: rows == 32), make_layers()
    linears = LinearDispatch(timing.ops)
    linears.choose(layers, [], 40, timing.capture, timing.timer)
    assert linears.kernel_shapes == {(rows, *shape) for rows in (1, 16, 64) for shape in ((12, 8), (5, 12))}
    assert timing.num_captured == 2 * 2 * 4, "two methods, two shapes, and 1, 16, 32 and 40 rows"
    timing.rows.clear()
    for rows in (1, 2, 16, 17, 32, 33, 64, 65):
        for layer in layers:
            x = torch.randn(rows, layer.in_features)
            torch.testing.assert_close(linears(layer, x), layer(x))
    assert timing.rows == [rows for rows in (1, 2, 16, 33, 64) for _ in layers]


@torch.inference_mode()
@pytest.mark.parametrize("is_faster", [True, False])
def test_gemv_computes_the_norm_before_it_where_that_is_faster(is_faster):
    launches: list[str] = []
    ops = PLAIN._replace(
        add_rms_norm=lambda *arguments: launches.append("norm") or PLAIN.add_rms_norm(*arguments),
        gemv=lambda *arguments: launches.append("gemv") or PLAIN.gemv(*arguments),
        gated_gemv=lambda *arguments: launches.append("gemv") or PLAIN.gated_gemv(*arguments),
    )

    def timer(step):
        launches.clear()
        step()
        return 1.0 if "gemv" in launches and is_faster == ("norm" not in launches) else 2.0

    linears, norm = LinearDispatch(ops), RMSNorm(8, 1e-5)
    torch.nn.init.normal_(norm.weight)
    layers = [(nn.Linear(8, 12), False), (nn.Linear(8, 12), False), (nn.Linear(8, 20), True)]
    normed = [NormedLinear(layer, norm, is_gated) for layer, is_gated in layers]
    linears.kernel_shapes = {(1, 12, 8), (1, 20, 8)}
    linears.choose([], normed, 2, lambda step, shares_memory: step, timer)
    assert linears.normed_shapes == (linears.kernel_shapes if is_faster else set())
    for (layer, is_gated), rows in product(layers, (1, 2)):
        x, residual = torch.randn(2, rows, 8)
        total = x + residual
        expected = layer(norm(total))
        if is_gated:
            expected = torch.nn.functional.silu(expected[:, :10]) * expected[:, 10:]
        launches.clear()
        result, new_residual = linears.after_norm(layer, norm, x, residual, is_gated)
        torch.testing.assert_close((result, new_residual), (expected, total))
        assert ("norm" in launches) == (rows == 2 or not is_faster)


@torch.inference_mode()
@pytest.mark.parametrize("rows", [1, 5])
def test_results_go_to_out(rows):
    [layer, _, unbiased], linears = make_layers(), LinearDispatch(PLAIN)
    linears.kernel_shapes.add((1, 12, 8))
    for each in (layer, unbiased):
        x, out = torch.randn(rows, each.in_features), torch.empty(rows, each.out_features)
        assert linears(each, x, out=out) is out
        torch.testing.assert_close(out, each(x))


@torch.inference_mode()
def test_each_format_of_a_layer_has_a_product_of_its_own():
    layer, x, out, launches = MixedLinear(nn.Linear(32, 96), FORMATS), torch.randn(5, 32), torch.empty(5, 96), []
    weights = [torch.randn(part.out_features, 32) for part in layer.parts]
    for part, weight in zip(layer.parts, weights, strict=True):
        part.quantize([weight])
    ops = PLAIN._replace(gemm=lambda x, part, out: launches.append(part.format) or PLAIN.gemm(x, part, out))
    assert LinearDispatch(ops)(layer, x, out=out) is out and launches == [Format.INT4, Format.INT8]
    weight = torch.cat([part.dequantize() for part in layer.parts])
    torch.testing.assert_close(out, nn.functional.linear(x, weight, layer.bias))


@torch.inference_mode()
@pytest.mark.parametrize(("rows", "uses_gemv", "num_gated"), [(1, True, 1), (1, False, 0), (2, True, 0)])
def test_gated_gemv_replaces_two_kernels_for_a_single_row(rows, uses_gemv, num_gated):
    calls = []
    ops = PLAIN._replace(gated_gemv=lambda *arguments: calls.append(1) or PLAIN.gated_gemv(*arguments))
    linears, layer, x = LinearDispatch(ops), nn.Linear(8, 12), torch.randn(rows, 8)
    if uses_gemv:
        linears.kernel_shapes |= {(1, 12, 8), (16, 12, 8)}
    gate, up = layer(x).chunk(2, dim=-1)
    torch.testing.assert_close(linears.gated(layer, x), nn.functional.silu(gate) * up)
    assert len(calls) == num_gated
