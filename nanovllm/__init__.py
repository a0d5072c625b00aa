"""nanovllm: an LLM inference engine with vLLM's interface, as a package and a command.

llm.py, async_llm.py   LLM and AsyncLLM: start reading here
engine/                schedules requests and manages the KV cache; the stages build it step by step
llama/                 the model: Llama, Mistral, Qwen 2.5 and Qwen 3, the same as in the stages
backends/              computes a step: torch/ (plain operations), cpu/ (Numba), gpu/ (Triton, CUDA graphs)
checkpoints/           finds and validates a checkpoint; tokenizer, chat template, memory sizes
server/                `nanovllm serve`: the OpenAI API over HTTP, metrics, and a web page that shows the KV cache
trace/                 records the events of an engine, replays them, and converts them for a viewer
bench/                 measures the throughput and latency of this engine and others
cli/                   the commands
vllm_names.py          vLLM's other modules, from nanovllm.sampling_params to nanovllm.v1, for scripts
"""

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

from .vllm_names import Finder, missing_name

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
# The modules that define these names. Later ones import from earlier ones: the first that has a name defines it.
MODULES = (
    *("options.config", "options.engine_args", "requests.sampling_params", "requests.pooling_params"),
    *("requests.prompts", "requests.tokens", "requests.outputs", "metrics", "stats"),
    *("llm_engine", "beam_search", "llm", "async_llm"),
)


sys.meta_path.insert(0, Finder())


def __getattr__(name: str) -> Any:
    """Import a public name, and torch with it, on first use, so that `--help` appears immediately."""
    if name not in __all__:
        raise missing_name(__name__, name)
    modules = (import_module(f"{__name__}.{module}") for module in MODULES)
    return next(getattr(module, name) for module in modules if hasattr(module, name))


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
