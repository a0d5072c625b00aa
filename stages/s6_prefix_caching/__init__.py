"""Stage 6: prefix caching.

Unlike the stage before:
- a full block, once computed, is known by its tokens and all before them: a sequence that begins alike holds it too;
- a block that nobody holds any more keeps its text until its room is needed: the one unused longest goes first, and
  the end of a text before its beginning.
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
