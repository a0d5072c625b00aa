"""Stage 7: CPU offload.

Unlike the previous stage:
- the prefix cache has a second tier: a cached block that is evicted goes to the host, and returns when it is hit;
- a sequence waits while its blocks are loaded, and others run;
- the choice between loading and computing again is made once, from two measured speeds: a copy's and a prefill's.
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
