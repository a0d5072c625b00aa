"""A ModelRunner that can be told to use kernels, and to leave them."""

import torch

from ..api.model_runner import ModelRunner
from ..core.llama import LlamaForCausalLM


class KernelRunner(ModelRunner):
    uses_kernels = False

    def use_kernels(self) -> None:
        """All entries are compiled, and no request is there."""
        self.uses_kernels = True

    def drop_kernels(self) -> None:
        self.uses_kernels = False


def refusal(model: LlamaForCausalLM, device: torch.device, dtype: torch.dtype) -> str | None:
    """Why kernels cannot serve this model; None: they can."""
    return None if device.type == "cpu" else f"kernels are for the CPU, the device is {device}"
