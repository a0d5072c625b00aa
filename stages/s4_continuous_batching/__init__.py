"""Stage 4: continuous batching.

Unlike the stage before:
- at every step it is decided anew which sequences run: one joins as soon as there is room, and leaves when it ends;
- nothing is promised: blocks are taken as tokens come, and when none is left the latest sequence waits and starts over;
- a long prompt is computed in chunks, in the same step as the next tokens of the others.
"""

from .config import EngineConfig
from .engine import LLMEngine
from .llm import LLM
from .outputs import CompletionOutput, RequestOutput
from .sampling import SamplingParams

__all__ = ["LLM", "CompletionOutput", "EngineConfig", "LLMEngine", "RequestOutput", "SamplingParams"]
