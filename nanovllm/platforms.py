"""vLLM's module `vllm.platforms`: the device that an engine uses by default."""

import torch

from .engine.config import default_device
from .missing_names import import_or_raise


class Platform:
    """The kind of machine that this process runs on."""

    @property
    def device_type(self) -> str:
        return default_device()

    def is_cpu(self) -> bool:
        return self.device_type == "cpu"

    def is_cuda(self) -> bool:
        return self.is_cuda_alike() and not self.is_rocm()

    def is_cuda_alike(self) -> bool:
        return self.device_type == "cuda"

    def is_rocm(self) -> bool:
        return self.is_cuda_alike() and torch.version.hip is not None


current_platform = Platform()
__all__ = ["Platform", "current_platform"]
__getattr__ = import_or_raise(__name__)
