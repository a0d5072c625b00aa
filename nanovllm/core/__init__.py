"""Stage 7: CPU offload.

Unlike the stage before:
- the host has a pool of blocks too: a preempted group's blocks go there and come back, what is shared once;
- whether they do, or are computed again, is decided by the measured speeds of a copy and of a prefill;
- cached blocks that the device has no room for go to the host as well, and are found there.
"""

from .beam_search import BeamSearchParams
from .config import EngineConfig
from .engine import LLMEngine
from .llm import LLM
from .outputs import CompletionOutput, RequestOutput
from .sampling import Logprob, SamplingParams

__all__ = [
    "LLM",
    "BeamSearchParams",
    "CompletionOutput",
    "EngineConfig",
    "LLMEngine",
    "Logprob",
    "RequestOutput",
    "SamplingParams",
]
