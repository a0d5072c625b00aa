"""nanovllm: an LLM inference engine with vLLM's interface, as a package and a command.

llm.py, async_llm.py   LLM and AsyncLLM: start reading here
engine/                schedules requests and manages the KV cache; stages/ in the repository builds it step by step
llama/                 the model: Llama, Mistral, Qwen 2.5 and Qwen 3, with the same code as in stages/
backends/              computes a step: torch/ (plain operations), cpu/ (Numba), gpu/ (Triton, CUDA graphs)
checkpoints/           finds and validates a checkpoint; tokenizer, chat template, memory sizes
server/                `nanovllm serve`: the OpenAI API over HTTP, metrics, and a web page that shows the KV cache
trace/                 records the events of an engine, replays them, and converts them for a viewer
bench/                 measures the throughput and latency of this engine and others
cli/                   the commands
vllm_names.py          vLLM's module names, such as nanovllm.sampling_params, for scripts that import from them
"""

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

from .vllm_names import VLLMModuleFinder, missing_name_error

if TYPE_CHECKING:
    from .async_llm import AsyncLLM, AsyncLLMEngine, EngineDeadError
    from .beam_search import BeamSearchOutput, BeamSearchParams, BeamSearchSequence
    from .llm import LLM
    from .llm_engine import LLMEngine
    from .metrics import Counter, Gauge, Histogram, Metric, Vector
    from .options.config import EngineConfig
    from .options.engine_args import AsyncEngineArgs, EngineArgs
    from .requests.outputs import CompletionOutput, EmbeddingOutput, EmbeddingRequestOutput, RequestOutput
    from .requests.pooling_params import PoolingParams
    from .requests.prompts import PromptType, TextPrompt, TokensPrompt
    from .requests.sampling_params import (
        RepetitionDetectionParams,
        RequestOutputKind,
        SamplingParams,
        StructuredOutputsParams,
    )
    from .requests.tokens import Logprob
    from .stats import EngineStats

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
    "EmbeddingOutput",
    "EmbeddingRequestOutput",
    "EngineArgs",
    "EngineConfig",
    "EngineDeadError",
    "EngineStats",
    "Gauge",
    "Histogram",
    "LLMEngine",
    "Logprob",
    "Metric",
    "PoolingParams",
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
# The modules that define these names. Each imports only from those before it in the list, so the first module that has
# a name defines it.
MODULES = (
    *("options.config", "options.engine_args", "requests.sampling_params", "requests.pooling_params"),
    *("requests.prompts", "requests.tokens", "requests.outputs", "metrics", "stats"),
    *("llm_engine", "beam_search", "llm", "async_llm"),
)


sys.meta_path.insert(0, VLLMModuleFinder())


def __getattr__(name: str) -> Any:
    """Import a public name on first use. Importing all of them, and torch with them, would delay `--help`."""
    if name not in __all__:
        raise missing_name_error(__name__, name)
    modules = (import_module(f"{__name__}.{module}") for module in MODULES)
    return next(getattr(module, name) for module in modules if hasattr(module, name))


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
