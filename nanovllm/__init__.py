"""nanovllm, the finished engine: what the seven stages have grown, as a package to install and a command to run.

Unlike the stage before:
- `nanovllm generate` and `nanovllm batch`, in place of a stage's one command;
- a file of requests is judged as a whole before anything is computed, and each result is written when it is there.
"""

from .beam_search import BeamSearchParams
from .config import EngineConfig
from .engine import LLMEngine
from .llm import LLM
from .outputs import CompletionOutput, RequestOutput
from .sampling import Logprob, SamplingParams

__all__ = [
    "LLM",
    "BeamSearchParams",
    "CompletionOutput",
    "EngineConfig",
    "LLMEngine",
    "Logprob",
    "RequestOutput",
    "SamplingParams",
]
