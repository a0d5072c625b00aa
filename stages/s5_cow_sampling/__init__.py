"""Stage 5: copy-on-write sampling.

Unlike the stage before:
- a block counts who holds it: a prompt of n samples is computed once, and forked when one token of it is left;
- a sequence that writes to a shared block gets a copy of it first, and the copies of a step are made together;
- optional: beam search, which forks at every token.
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
