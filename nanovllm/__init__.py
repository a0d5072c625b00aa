"""nanovllm, the finished engine: a package to install and a command to run.

core/   the code of stage 7, byte for byte
api/    what a user gets beyond it: vLLM's parameters and outputs
cli/    nanovllm generate, nanovllm batch, nanovllm trace
trace/  what an engine does, as events: written, replayed, converted for a viewer
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .api import (
        LLM,
        BeamSearchParams,
        CompletionOutput,
        EngineConfig,
        FlatLogprobs,
        LLMEngine,
        Logprob,
        RepetitionDetectionParams,
        RequestOutput,
        RequestOutputKind,
        SamplingParams,
    )

__version__ = "0.1.0"
__all__ = [
    "LLM",
    "BeamSearchParams",
    "CompletionOutput",
    "EngineConfig",
    "FlatLogprobs",
    "LLMEngine",
    "Logprob",
    "RepetitionDetectionParams",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
]


def __getattr__(name: str) -> Any:
    """Import the engine, and torch with it, when the first of its names is asked for: --help needs neither."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(".api", __name__), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
