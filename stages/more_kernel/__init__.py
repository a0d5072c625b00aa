"""A paged kernel: a branch of stage 7.

Unlike stage 7:
- attention reads keys and values in their blocks: a kernel follows each block table to its end, and copies nothing;
- the kernel is Python that Numba compiles for a CPU, and the same loop in Triton runs on a GPU;
- a chunk of a prompt with a long past is slower, because each of its tokens reads that past anew.
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
