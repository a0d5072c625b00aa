"""PackedLinear: a linear layer whose weight is a second time in memory, in the order that its matmul reads it in.

A matmul library reorders the weight, block by block, each time it multiplies. oneDNN, which torch brings, can keep the
reordered weight: steps of many rows take 0.4 to 0.7 of the time then. The plain weight stays where it is, a step of few
rows reads it there.

The two operations are torch's own, behind its compiler, and not public: where they are missing, or do not take a
dtype, the layers stay as they are.
"""

from pathlib import Path

import torch
from torch import Tensor, nn

from ..core.llama import LlamaForCausalLM


class PackedLinear(nn.Module):
    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.plain = linear
        self.bias = linear.bias
        self.packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach())

    @property
    def weight(self) -> Tensor:
        return self.plain.weight

    def forward(self, x: Tensor) -> Tensor:
        """x [num_rows, in_features] -> [num_rows, out_features]"""
        return torch.ops.mkldnn._linear_pointwise.default(x, self.packed, self.bias, "none", [], "")


def why_not_packed(model: LlamaForCausalLM) -> str | None:
    """The reason, in a few words, if the weights of `model` cannot be packed; None if they can."""
    weight = model.lm_head.weight
    if weight.device.type != "cpu":
        return f"weights on {weight.device.type} are not packed"
    try:
        with torch.no_grad():
            PackedLinear(nn.Linear(32, 32, dtype=weight.dtype))(torch.zeros(2, 32, dtype=weight.dtype))
    except (AttributeError, RuntimeError):
        return f"torch {torch.__version__} does not pack {str(weight.dtype).removeprefix('torch.')} here"
    needed, free = sum(linear.weight.nbytes for linear in linears_of(model)), free_memory()
    if free is not None and needed > free // 2:
        return f"packed weights need {needed:,} bytes, {free:,} are free"
    return None


def linears_of(model: nn.Module) -> list[nn.Linear]:
    return [module for module in model.modules() if isinstance(module, nn.Linear)]


def free_memory() -> int | None:
    """Bytes that can be had without swapping; None where the system does not tell."""
    try:
        lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        return int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return None
