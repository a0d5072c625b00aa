"""Stage 7: CPU offload.

Unlike the stage before:
- the prefix cache has a second tier: a cached block that is evicted goes to the host, and comes back when it is hit;
- a sequence whose blocks are on their way waits, while others run;
- whether to load or to compute again is decided once, from the measured speeds of a copy and of a prefill.
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
