"""vLLM's module `vllm.config`. The engine's own options are in engine/config.py."""

from typing import Literal, NotRequired, TypedDict

from .missing_names import import_or_raise


class ProfilerConfig(TypedDict):
    """The option `profiler_config`."""

    profiler: Literal["torch", "cuda"]
    torch_profiler_dir: NotRequired[str]


__all__ = ["ProfilerConfig"]
__getattr__ = import_or_raise(__name__)
