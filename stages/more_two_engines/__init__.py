"""Two engines: a branch of stage 7.

Unlike stage 7:
- a second engine, in a process of its own, computes prompts, so that they hold up no sequence that decodes;
- it sends their full blocks, by their hashes, to the host's pool, and the request hits them there;
- the first engine never waits for the second one while it has work, and does without it if it is full or dead.
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
