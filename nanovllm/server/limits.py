"""How much may be asked for: by one request, and by all that wait."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from ..engine.sampling_params import SamplingParams
from .errors import TooBusy
from .messages import Add
from .options import ServerOptions

MAX_CHOICES = 2048  # of an answer: each is a sequence in the engine from the moment the request comes
MAX_FORM = 1 << 16  # characters: to make a grammar of more takes the engine half a second
FORMS = ("structured_outputs", "response_format")
MAX_ENTRIES = {  # of a list or an object: all of them are looked at when the request comes, or at each token
    "messages": 1 << 13,
    "input": 1 << 13,
    "tools": 1 << 10,
    "documents": 1 << 13,
    "chat_template_kwargs": 1 << 10,
    "metadata": 16,  # as OpenAI has it
    "stop": 32,
    "bad_words": 128,
    "logprob_token_ids": 128,
    "stop_token_ids": 1 << 16,
    "allowed_token_ids": 1 << 16,
    "logit_bias": 1 << 16,
}
Rejections = Counter[str]  # by the name of the limit


class Load(Protocol):
    """What of an EngineClient is looked at."""

    num_samples: int  # that have not ended
    num_waiting_tokens: int  # of prompts of which no token has come yet


def check_counts(body: Mapping[str, Any]) -> None:
    """Of a body as it came, before anything is made of it. Raises ValueError for more than anybody needs."""
    for name, most in MAX_ENTRIES.items():
        given = body.get(name)
        if isinstance(given, list | dict) and len(given) > most:
            raise ValueError(f"{name} has {len(given):,} entries: at most {most:,} are taken")
    for name in FORMS:
        if (size := len(json.dumps(body.get(name)))) > MAX_FORM:
            raise ValueError(f"{name} has {size:,} characters: at most {MAX_FORM:,} are taken")
    prompts = body.get("prompt")
    if isinstance(prompts, list) and prompts and not isinstance(prompts[0], int):
        check_choices(len(prompts))


def check_choices(count: int) -> None:
    if count > MAX_CHOICES:
        raise ValueError(f"the request asks for {count:,} choices: an answer has at most {MAX_CHOICES:,}")


def check_size(requests: Sequence[Add], options: ServerOptions, max_model_len: int) -> None:
    """Raises ValueError for a request that may come to more than one is to have."""
    check_choices(sum(request.params.n for request in requests))
    for request in requests:
        if len(request.token_ids) >= max_model_len:  # the engine says the same, once it has read all of them
            told = f"max_model_len {max_model_len} leaves room for {max_model_len - 1} and one new token"
            raise ValueError(f"the prompt has {len(request.token_ids)} tokens; {told}")
    check_logprobs(requests[0].params, options)
    num_tokens = sum(request.params.n * most_tokens(request, max_model_len) for request in requests)
    if options.max_request_tokens is not None and num_tokens > options.max_request_tokens:
        limit = f"this server allows {options.max_request_tokens:,}"
        raise ValueError(f"the request may come to {num_tokens:,} tokens, prompts and outputs together: {limit}")


def check_logprobs(params: SamplingParams, options: ServerOptions) -> None:
    """Raises ValueError for work of each step that everybody else would wait for."""
    for name, where in (("logprobs", " (of a chat: top_logprobs)"), ("prompt_logprobs", "")):
        count, most = getattr(params, name), options.max_logprobs
        if count is not None and most >= 0 and not 0 <= count <= most:
            raise ValueError(f"{name}{where} must be at most {most}, which is this server's max_logprobs, not {count}")


def most_tokens(request: Add, max_model_len: int) -> int:
    """Of one sample, with its prompt."""
    most = request.params.max_tokens
    return max_model_len if most is None else min(len(request.token_ids) + most, max_model_len)


def check_room(requests: Sequence[Add], options: ServerOptions, load: Load, rejections: Rejections) -> None:
    """Raises TooBusy if as much runs and waits as may. Both limits are vLLM's, and count what vLLM counts.

    A sample is a request here, too. A prompt counts in full until its first token has come.
    """
    most, asked = options.max_num_queued_reqs, sum(request.params.n for request in requests)
    if most is not None and load.num_samples + asked > most:
        name = "max_num_queued_reqs"
        error = f"{load.num_samples} requests run or wait, and {asked} more would be over {name}, {most}"
    elif (most := options.max_num_queued_tokens) is not None and load.num_waiting_tokens >= most:
        name = "max_num_queued_tokens"
        error = f"prompts of {load.num_waiting_tokens:,} tokens wait: {name} is {most:,}"
    else:
        return
    rejections[name] += 1
    raise TooBusy(error)
