"""Stage 3: paged attention.

Unlike the stage before:
- attention copies and reads a tile of blocks at a time, and merges the results: no context is copied whole;
- all sequences go through a tile together, in the same few operations whether they are one or a hundred.
"""

from .config import EngineConfig
from .llm import LLM
from .outputs import CompletionOutput, RequestOutput
from .sampling import SamplingParams

__all__ = ["LLM", "CompletionOutput", "EngineConfig", "RequestOutput", "SamplingParams"]
