"""Stage 5: copy-on-write sampling.

Unlike the stage before:
- a block counts who holds it: the samples of a prompt (n) share its blocks, and what they share is computed once;
- a sequence that writes to a shared block gets a copy of it first, and the copies of a step are made together.
"""

from .beam_search import BeamSearchParams
from .config import EngineConfig
from .engine import LLMEngine
from .llm import LLM
from .outputs import CompletionOutput, RequestOutput
from .sampling import SamplingParams

__all__ = [
    "LLM",
    "BeamSearchParams",
    "CompletionOutput",
    "EngineConfig",
    "LLMEngine",
    "RequestOutput",
    "SamplingParams",
]
