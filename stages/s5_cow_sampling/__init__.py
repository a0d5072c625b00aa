"""Stage 5: copy-on-write sampling.

Unlike the stage before:
- each block has a reference count: n samples compute their prompt once, and are forked one token before its end;
- a sequence copies a shared block before it writes to it, and the copies of a step are made together.
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
