"""PackedLinear: a linear layer whose weight is a second time in memory, in the order that matmul.py reads it in.

The plain weight stays where it is: steps of few rows read it there, and plain operations when kernels are dropped.
"""

from pathlib import Path

import torch
from torch import Tensor, nn

from ...llama import LlamaForCausalLM
from .matmul import COLUMNS, pack, packed_linear, type_of
from .plan import like_of


class PackedLinear(nn.Module):
    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.plain = linear
        self.bias = linear.bias
        weight = linear.weight.detach()
        self.packed = pack(weight)
        self._bias = weight.new_zeros(len(weight)) if linear.bias is None else linear.bias.detach()
        self._type = type_of(weight.dtype)  # asked once: to ask the processor takes as long as many a product
        self._likes = like_of(self._type), like_of(weight.dtype)

    @property
    def weight(self) -> Tensor:
        return self.plain.weight

    def forward(self, x: Tensor) -> Tensor:
        """x [num_rows, in_features] -> [num_rows, out_features]"""
        (rows, size), outputs = x.shape, len(self._bias)
        out = x.new_empty(rows, outputs)
        x = x.to(self._type).contiguous()
        addresses = self.packed.data_ptr(), self._bias.data_ptr(), outputs, out.data_ptr()
        packed_linear(x.data_ptr(), rows, size, *addresses, torch.get_num_threads(), *self._likes)
        return out


def why_not_packed(model: LlamaForCausalLM) -> str | None:
    """Return why the weights of `model` cannot be packed, in a few words, or None if they can."""
    linears = linears_of(model)
    for linear in linears:
        outputs, size = linear.weight.shape
        if outputs < COLUMNS or size % 2:
            return f"a weight of {outputs} x {size} is not packed: {COLUMNS} x 2 is a block"
    if model.config.intermediate_size % COLUMNS:
        return f"an MLP of {model.config.intermediate_size} is not packed: {COLUMNS} outputs are a block"
    needed, free = sum(linear.weight.nbytes for linear in linears), free_memory()
    if free is not None and needed > free // 2:
        return f"packed weights need {needed:,} bytes, {free:,} are free"
    return None


def linears_of(model: nn.Module) -> list[nn.Linear]:
    return [module for module in model.modules() if isinstance(module, nn.Linear)]


def free_memory() -> int | None:
    """Return the bytes that are available without swapping, or None if the system does not say."""
    try:
        lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        return int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return None
