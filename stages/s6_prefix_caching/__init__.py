"""Stage 6: prefix caching.

Unlike the stage before:
- a full block, once computed, is known by its tokens and all before them: who begins alike holds it and computes less;
- a block that nobody holds any more stays until its room is needed: the one unused longest goes first, and the end of
  a text before its beginning;
- a prompt's own log-probabilities can be asked for (prompt_logprobs).
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
