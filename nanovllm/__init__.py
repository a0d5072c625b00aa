"""nanovllm, the finished engine: a package to install and a command to run.

core/         the code of stage 7, byte for byte
api/          what a user gets beyond it: vLLM's interface
checkpoints/  models as people have them: folders, names of the hub, tokenizers, chat templates, sizes
cli/          the commands: generate, chat, batch, inspect, bench, trace, stages
kernels/      fast paths on a CPU, compiled by Numba; the engine runs without them
trace/        what an engine does, as events: written, replayed, converted for a viewer
server/       page/, which plays an engine's memory
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .api import (
        LLM,
        AsyncEngineArgs,
        AsyncLLM,
        AsyncLLMEngine,
        BeamSearchOutput,
        BeamSearchParams,
        BeamSearchSequence,
        CompletionOutput,
        Counter,
        EngineArgs,
        EngineConfig,
        EngineDeadError,
        EngineStats,
        FlatLogprobs,
        Gauge,
        Histogram,
        LLMEngine,
        Logprob,
        Metric,
        PromptType,
        RepetitionDetectionParams,
        RequestOutput,
        RequestOutputKind,
        SamplingParams,
        StructuredOutputsParams,
        TextPrompt,
        TokensPrompt,
        Vector,
    )

__version__ = "0.1.0"
__all__ = [
    "LLM",
    "AsyncEngineArgs",
    "AsyncLLM",
    "AsyncLLMEngine",
    "BeamSearchOutput",
    "BeamSearchParams",
    "BeamSearchSequence",
    "CompletionOutput",
    "Counter",
    "EngineArgs",
    "EngineConfig",
    "EngineDeadError",
    "EngineStats",
    "FlatLogprobs",
    "Gauge",
    "Histogram",
    "LLMEngine",
    "Logprob",
    "Metric",
    "PromptType",
    "RepetitionDetectionParams",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "StructuredOutputsParams",
    "TextPrompt",
    "TokensPrompt",
    "Vector",
]


def __getattr__(name: str) -> Any:
    """Import the engine, and torch with it, when the first of its names is asked for: --help needs neither."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(".api", __name__), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
