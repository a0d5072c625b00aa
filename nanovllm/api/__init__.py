"""What a user of the product gets beyond stage 7: vLLM's interface.

It is built by overriding core, never by an edit in it.

params.py             SamplingParams with all of vLLM's fields
params_reading.py     how a value is read
params_checks.py      what a field may be
input_processor.py    a prompt and its parameters into sequences
logits_processors.py  what the parameters do to logits before a token is sampled
structured_outputs.py the form that an output must have
json_schema.py        the JSON schema of a request
grammars.py           holds an output to that form, by llguidance
token_bytes.py        what each token adds to a text
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
engine_args.py        EngineArgs: the engine's options by vLLM's names
engine_args_reading.py  how a value is read
engine_args_checks.py what an option may be
only_in_vllm.py       what vLLM has and nanovllm has not, refused in words
prompts.py            what a caller may give as a prompt
conversations.py      and as a conversation, and a template
counting.py           parts that count what core's do not
stats.py              EngineStats: pool, queues and counts, when they are asked for
metrics.py            the same under vLLM's names
llm_engine.py         LLMEngine: an engine that a script steps by itself
beam_search.py        beams as vLLM gives them
progress.py           the progress bar of generate()
call_outputs.py       what a call makes of the engine's outputs
llm.py                LLM: generate(), chat(), beam_search()
engine_thread.py      a thread that alone touches an engine
async_llm.py          AsyncLLM: many callers of one engine
"""

from ..engine.config import EngineConfig
from .async_llm import AsyncLLM, AsyncLLMEngine
from .beam_search import BeamSearchOutput, BeamSearchParams, BeamSearchSequence
from .engine_args import AsyncEngineArgs, EngineArgs
from .engine_thread import EngineDeadError
from .flat_logprobs import FlatLogprobs
from .llm import LLM
from .llm_engine import LLMEngine
from ..backends.torch.logprobs import Logprob
from .metrics import Counter, Gauge, Histogram, Metric, Vector
from .outputs import CompletionOutput, RequestOutput
from .params import RepetitionDetectionParams, RequestOutputKind, SamplingParams
from .prompts import PromptType, TextPrompt, TokensPrompt
from .stats import EngineStats
from .structured_outputs import StructuredOutputsParams

__all__ = [
    "LLM",
    "AsyncEngineArgs",
    "AsyncLLM",
    "AsyncLLMEngine",
    "BeamSearchOutput",
    "BeamSearchParams",
    "BeamSearchSequence",
    "CompletionOutput",
    "Counter",
    "EngineArgs",
    "EngineConfig",
    "EngineDeadError",
    "EngineStats",
    "FlatLogprobs",
    "Gauge",
    "Histogram",
    "LLMEngine",
    "Logprob",
    "Metric",
    "PromptType",
    "RepetitionDetectionParams",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "StructuredOutputsParams",
    "TextPrompt",
    "TokensPrompt",
    "Vector",
]
