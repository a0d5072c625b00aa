"""Stage 2: a block manager.

Unlike the stage before:
- the pool is cut into blocks of a few slots, and a sequence takes one more whenever its tokens have filled the others;
- a block table says where a sequence's blocks lie: anywhere, so nothing is lost between them;
- attention gathers a sequence's blocks into one piece before it reads them: a copy of the whole history, every step.
"""

from .config import EngineConfig
from .llm import LLM
from .outputs import CompletionOutput, RequestOutput
from .sampling import SamplingParams

__all__ = ["LLM", "CompletionOutput", "EngineConfig", "RequestOutput", "SamplingParams"]
