"""Stage 2: a block manager.

Unlike the stage before:
- the pool is cut into blocks of a few slots, and a sequence takes another one whenever its tokens have filled the rest;
- a block table lists the blocks of a sequence: they may lie anywhere, so nothing is lost between them;
- attention gathers the blocks of a sequence into one piece before it reads them: every step copies the whole context.
"""

from .config import EngineConfig
from .llm import LLM
from .outputs import CompletionOutput, RequestOutput
from .sampling import SamplingParams

__all__ = ["LLM", "CompletionOutput", "EngineConfig", "RequestOutput", "SamplingParams"]
