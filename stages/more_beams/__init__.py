"""Beam search: a branch of stage 5.

Unlike stage 5:
- LLM.beam_search() returns the most likely outputs that it can find, instead of samples;
- a beam is a sequence: at every token it is forked for each continuation that is kept, and then it is freed;
- blocks are shared and copied as for samples, by the same block manager.
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
