"""What a user of the product gets beyond stage 7: vLLM's parameters and outputs.

It is built by overriding core, never by an edit in it.

params.py             SamplingParams with all of vLLM's fields
params_reading.py     how a value is read
params_checks.py      what a field may be
input_processor.py    a prompt and its parameters into sequences
logits_processors.py  what the parameters do to logits before a token is sampled
bad_words.py          bad words as tokens
model_runner.py       samples, and tells log-probabilities, of a prompt a whole chunk at a time
logprobs.py           of rows of logits, the likeliest tokens and their log-probabilities
decoded_tokens.py     the text of each of them
flat_logprobs.py      many of them in a few lists
sequence.py           a sequence keeps what was told of its tokens
output_text.py        its text, up to a stop string
repetition.py         whether it repeats itself
outputs.py            outputs that hold all of it
engine.py             an engine of these parts
llm.py                LLM with that engine
"""

from ..core import BeamSearchParams, EngineConfig
from .engine import LLMEngine
from .flat_logprobs import FlatLogprobs
from .llm import LLM
from .logprobs import Logprob
from .outputs import CompletionOutput, RequestOutput
from .params import RepetitionDetectionParams, RequestOutputKind, SamplingParams

__all__ = [
    "LLM",
    "BeamSearchParams",
    "CompletionOutput",
    "EngineConfig",
    "FlatLogprobs",
    "LLMEngine",
    "Logprob",
    "RepetitionDetectionParams",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
]
