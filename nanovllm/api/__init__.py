"""What a user of the product gets beyond stage 7: log-probabilities, and how much of a prompt was cached.

It is built by overriding core, never by an edit in it.

params.py         SamplingParams with logprobs and prompt_logprobs
outputs.py        outputs that hold them
logprobs.py       of rows of logits, the likeliest tokens and their log-probabilities
sequence.py       a sequence keeps what was told of its tokens
model_runner.py   tells it, a whole chunk at a time
engine.py         an engine of these parts
llm.py            LLM with that engine
"""

from ..core import BeamSearchParams, EngineConfig
from .engine import LLMEngine
from .llm import LLM
from .logprobs import Logprob
from .outputs import CompletionOutput, RequestOutput
from .params import SamplingParams

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
