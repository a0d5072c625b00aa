"""Speculation: a branch of stage 7.

Unlike stage 7:
- the next tokens of a sequence are guessed from its own text, and one step checks several guesses;
- a guess takes no block that is cached, and the blocks that only wrong guesses needed are given back;
- the tokens are the same as without guesses, greedy or sampled.
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
