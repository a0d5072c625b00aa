"""Two ranks: a branch of stage 7.

Unlike stage 7:
- a model can be divided: each rank, a process, has some of the heads and of the MLP's units, and all-reduces add up;
- a block has the same tokens on all ranks, and on each the keys and values of its own heads;
- rank 0 schedules, and sends each step to the others. If one dies, all end.
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
