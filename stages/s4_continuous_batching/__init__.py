"""Stage 4: continuous batching.

Unlike the stage before:
- a scheduler chooses the sequences of every step: a request joins as soon as there is room, and leaves when it ends;
- no blocks are promised: a sequence takes them as it grows, and if none is free, the newest one is preempted;
- a long prompt is computed in chunks, in the same steps as the next tokens of other sequences.
"""

from .config import EngineConfig
from .engine import LLMEngine
from .llm import LLM
from .outputs import CompletionOutput, RequestOutput
from .sampling import SamplingParams

__all__ = ["LLM", "CompletionOutput", "EngineConfig", "LLMEngine", "RequestOutput", "SamplingParams"]
