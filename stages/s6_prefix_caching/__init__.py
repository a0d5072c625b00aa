"""Stage 6: prefix caching.

Unlike the previous stage:
- a full block is cached once it is computed, under a hash of its tokens and all tokens before them, and sequences with
  the same prefix share it;
- a cached block that no sequence holds stays cached until it is taken: the least recently used one goes first, and the
  end of a prefix before its beginning.
"""

from .config import EngineConfig
from .engine import LLMEngine
from .llm import LLM
from .outputs import CompletionOutput, RequestOutput
from .sampling import SamplingParams

__all__ = [
    "LLM",
    "CompletionOutput",
    "EngineConfig",
    "LLMEngine",
    "RequestOutput",
    "SamplingParams",
]
