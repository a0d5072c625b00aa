"""Linear layers of few rows: what was faster computes them, shape by shape."""

import pytest
import torch
from torch import nn

from ...backends.gpu.linear import Linears
from ...backends.gpu.ops import PLAIN


class Calls:
    """A gemv that notes its calls, graphs that are run again, and a timer that goes by which of the two ran."""

    def __init__(self, is_slow) -> None:
        self.rows: list[int] = []
        self.num_captured, self._is_slow = 0, is_slow
        self.ops = PLAIN._replace(gemv=self.gemv)

    def gemv(self, x, weight, bias, out):
        self.rows.append(len(x))
        PLAIN.gemv(x, weight, bias, out)

    def capture(self, step, shares_memory=True):
        assert not shares_memory, "a graph that is dropped"
        self.num_captured += 1
        return step

    def timer(self, step):
        before = len(self.rows)
        step()
        used = self.rows[before:]
        return 2.0 if used and self._is_slow(used[0]) else 1.0 if used else 1.5


def layers() -> list[nn.Linear]:
    return [nn.Linear(8, 12), nn.Linear(8, 12), nn.Linear(12, 5, bias=False)]


@torch.inference_mode()
def test_each_shape_takes_what_was_faster():
    calls, model = Calls(lambda rows: rows == 2), layers()
    linears = Linears(calls.ops)
    linears.choose(model, [1, 2, 4, 8], calls.capture, calls.timer)
    assert linears.by_kernel == {(rows, *shape) for rows in (1, 4) for shape in ((12, 8), (5, 12))}
    assert calls.num_captured == 2 * 2 * 3, "two ways, two shapes, rows 1, 2 and 4"
    calls.rows.clear()
    for rows in (1, 2, 3, 4, 8):
        for layer in model:
            x = torch.randn(rows, layer.in_features)
            torch.testing.assert_close(linears(layer, x), layer(x))
    assert calls.rows == [1] * 3 + [4] * 3


@torch.inference_mode()
@pytest.mark.parametrize("rows", [1, 5])
def test_the_result_goes_where_it_is_wanted(rows):
    [layer, _, unbiased], linears = layers(), Linears(PLAIN)
    linears.by_kernel.add((1, 12, 8))
    for each in (layer, unbiased):
        x, out = torch.randn(rows, each.in_features), torch.empty(rows, each.out_features)
        assert linears(each, x, out=out) is out
        torch.testing.assert_close(out, each(x))


@torch.inference_mode()
@pytest.mark.parametrize(("rows", "by_kernel", "num_gated"), [(1, True, 1), (1, False, 0), (2, True, 0)])
def test_a_gate_is_a_part_of_the_layer_where_one_row_goes_by_gemv(rows, by_kernel, num_gated):
    gated = []
    ops = PLAIN._replace(gated_gemv=lambda *given: gated.append(len(given[0])) or PLAIN.gated_gemv(*given))
    linears, layer, x = Linears(ops), nn.Linear(8, 12), torch.randn(rows, 8)
    if by_kernel:
        linears.by_kernel |= {(1, 12, 8), (2, 12, 8)}
    gate, up = layer(x).chunk(2, dim=-1)
    torch.testing.assert_close(linears.gated(layer, x), nn.functional.silu(gate) * up)
    assert len(gated) == num_gated
