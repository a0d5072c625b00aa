"""What a user of the product gets beyond stage 7: vLLM's interface.

It is built by overriding core, never by an edit in it.

params.py         SamplingParams with logprobs and prompt_logprobs
outputs.py        outputs that hold them
logprobs.py       of rows of logits, the likeliest tokens and their log-probabilities
sequence.py       a sequence keeps what was told of its tokens
model_runner.py   tells it, a whole chunk at a time
engine.py         an engine of these parts
engine_args.py    EngineArgs: the engine's options by vLLM's names
only_in_vllm.py   what vLLM has and nanovllm has not, refused in words
prompts.py        what a caller may give as a prompt or a conversation
counting.py       parts that count what core's do not
stats.py          EngineStats: pool, queues and counts, when they are asked for
metrics.py        the same under vLLM's names
llm_engine.py     LLMEngine: an engine that a script steps by itself
beam_search.py    beams as vLLM gives them
progress.py       generate()'s progress bar
llm.py            LLM: generate(), chat(), beam_search()
engine_thread.py  a thread that alone touches an engine
async_llm.py      AsyncLLM: many callers of one engine
"""

from ..core import EngineConfig
from .async_llm import AsyncLLM, AsyncLLMEngine
from .beam_search import BeamSearchOutput, BeamSearchParams, BeamSearchSequence
from .engine_args import AsyncEngineArgs, EngineArgs
from .engine_thread import EngineDeadError
from .llm import LLM
from .llm_engine import LLMEngine
from .logprobs import Logprob
from .metrics import Counter, Gauge, Histogram, Metric, Vector
from .outputs import CompletionOutput, RequestOutput
from .params import SamplingParams
from .prompts import PromptType, TextPrompt, TokensPrompt
from .stats import EngineStats

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
    "Gauge",
    "Histogram",
    "LLMEngine",
    "Logprob",
    "Metric",
    "PromptType",
    "RequestOutput",
    "SamplingParams",
    "TextPrompt",
    "TokensPrompt",
    "Vector",
]
