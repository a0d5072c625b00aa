"""nanovllm: an LLM inference engine with vLLM's interface, as a package and a command.

llm.py, async_llm.py   LLM and AsyncLLM: start reading here
engine/                schedules requests and manages the memory of their keys and values; it grew in the stages
llama/                 the model: Llama, Mistral, Qwen 2.5 and Qwen 3, the same as in the stages
backends/              computes a step: torch/ (plain operations), cpu/ (Numba), gpu/ (Triton, CUDA graphs)
checkpoints/           finds and checks a checkpoint; tokenizer, chat template, sizes
server/                `nanovllm serve`: the OpenAI API over HTTP, metrics, and a page that shows the memory
trace/                 records the events of an engine, replays them, and converts them for a viewer
bench/                 measures throughput and latency, also of other engines
cli/                   the commands
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .async_llm import AsyncLLM, AsyncLLMEngine, EngineDeadError
    from .engine.beam_search import BeamSearchOutput, BeamSearchParams, BeamSearchSequence
    from .engine.config import AsyncEngineArgs, EngineArgs, EngineConfig
    from .engine.llm_engine import LLMEngine
    from .engine.outputs import CompletionOutput, Logprob, RequestOutput
    from .engine.prompts import PromptType, TextPrompt, TokensPrompt
    from .engine.sampling_params import (
        RepetitionDetectionParams,
        RequestOutputKind,
        SamplingParams,
        StructuredOutputsParams,
    )
    from .engine.stats import Counter, EngineStats, Gauge, Histogram, Metric, Vector
    from .llm import LLM

__version__ = "0.2.0"
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
MODULES = {  # the module of each name
    **dict.fromkeys(("AsyncLLM", "AsyncLLMEngine", "EngineDeadError"), ".async_llm"),
    **dict.fromkeys(("BeamSearchOutput", "BeamSearchParams", "BeamSearchSequence"), ".engine.beam_search"),
    **dict.fromkeys(("AsyncEngineArgs", "EngineArgs", "EngineConfig"), ".engine.config"),
    "LLMEngine": ".engine.llm_engine",
    **dict.fromkeys(("CompletionOutput", "Logprob", "RequestOutput"), ".engine.outputs"),
    **dict.fromkeys(("PromptType", "TextPrompt", "TokensPrompt"), ".engine.prompts"),
    **dict.fromkeys(
        ("RepetitionDetectionParams", "RequestOutputKind", "SamplingParams", "StructuredOutputsParams"),
        ".engine.sampling_params",
    ),
    **dict.fromkeys(("Counter", "EngineStats", "Gauge", "Histogram", "Metric", "Vector"), ".engine.stats"),
    "LLM": ".llm",
}


def __getattr__(name: str) -> Any:
    """Import a public name, and torch with it, on first use: `--help` needs neither."""
    if name not in MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(MODULES[name], __name__), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
