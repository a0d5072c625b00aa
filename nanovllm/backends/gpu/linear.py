"""Linear layers of few rows: by gemv or by the library's matmul, whichever was faster here when the engine started.

A step of one row reads every weight for one multiplication each. How near a library's matmul comes to the memory's pace
then depends on the shape, the GPU and the library's version, so no rule is written down here: each shape is timed.
"""

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor, nn

from .graphs import Capture, Step
from .ops import Ops
from .split import MAX_GEMV_ROWS

REPEATS = 5
LEAST_GAIN = 0.97  # of the library's time: two that are equally fast would take turns from start to start
Shape = tuple[int, int, int]  # rows of x, outputs, size of a row


class Timer(Protocol):
    def __call__(self, step: Step) -> float:
        """Seconds that the device takes for it."""


class Linears:
    """linears(layer, x), for all linear layers of a model. Until choose() it is the library's."""

    def __init__(self, ops: Ops) -> None:
        self._ops = ops
        self.by_kernel: set[Shape] = set()

    def __call__(self, layer: nn.Linear, x: Tensor, out: Tensor | None = None) -> Tensor:
        """x [rows, size]; out, which is made if it is not given [rows, outputs]"""
        out = x.new_empty(len(x), len(layer.weight)) if out is None else out
        self._multiply((len(x), *layer.weight.shape) in self.by_kernel, layer, x, out)
        return out

    def gated(self, layer: nn.Linear, x: Tensor) -> Tensor:
        """silu(gate) * up of what the layer makes. x [rows, size] -> [rows, outputs / 2]"""
        out = x.new_empty(len(x), len(layer.weight) // 2)
        if len(x) == 1 and (1, *layer.weight.shape) in self.by_kernel:
            self._ops.gated_gemv(x, layer.weight, layer.bias, out)
        else:
            self._ops.silu_and_mul(self(layer, x), out)
        return out

    def _multiply(self, is_by_kernel: bool, layer: nn.Linear, x: Tensor, out: Tensor) -> None:
        if is_by_kernel:
            self._ops.gemv(x, layer.weight, layer.bias, out)
        elif layer.bias is None:
            torch.mm(x, layer.weight.t(), out=out)
        else:
            torch.addmm(layer.bias, x, layer.weight.t(), out=out)

    def choose(self, layers: list[nn.Linear], sizes: list[int], capture: Capture, timer: Timer) -> None:
        """Time each shape both ways, in a graph: there a launch costs next to nothing, as in a step.

        All layers of a shape go one after the other, so that a weight has left the GPU's cache when it comes again.
        """
        groups: dict[torch.Size, list[nn.Linear]] = {}
        for layer in layers:
            groups.setdefault(layer.weight.shape, []).append(layer)
        for rows in (size for size in sizes if size <= MAX_GEMV_ROWS):
            for shape, group in groups.items():
                x = group[0].weight.new_zeros(rows, shape[1])
                library, kernel = (self._seconds(is_it, group, x, capture, timer) for is_it in (False, True))
                if kernel < LEAST_GAIN * library:
                    self.by_kernel.add((rows, *shape))

    def _seconds(self, is_by_kernel: bool, group: list[nn.Linear], x: Tensor, capture: Capture, timer: Timer) -> float:
        """Return the seconds of the fastest of several passes through the layers."""
        out = x.new_empty(len(x), len(group[0].weight))

        def one_pass() -> None:
            for layer in group:
                self._multiply(is_by_kernel, layer, x, out)

        one_pass()  # what must be compiled is compiled
        replay = capture(one_pass, shares_memory=False)  # it is not kept
        return min(timer(replay) for _ in range(REPEATS))


def linear_layers(model: nn.Module) -> list[nn.Linear]:
    return [each for each in model.modules() if isinstance(each, nn.Linear)]


def seconds_on_gpu(step: Callable[[], None]) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    step()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1000
