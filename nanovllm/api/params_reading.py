"""How SamplingParams reads a value that may be said in several ways: as vLLM does."""

import warnings
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from ..engine.checks import is_number, is_whole
from .structured_outputs import StructuredOutputsParams

if TYPE_CHECKING:
    from .params import Fields

MIN_TEMPERATURE = 0.01  # logits divided by less lose their order in float32


def read_params(params: "Fields") -> None:
    """Bring what may be said in several ways into one. What has no right kind stays, for check_params() to show."""
    params.stop = listed([params.stop] if isinstance(params.stop, str) else params.stop, [])
    params.stop_token_ids = unique(listed(params.stop_token_ids, []))
    params.bad_words = unique(listed(params.bad_words, []))
    params.allowed_token_ids = listed(params.allowed_token_ids)
    params.logprob_token_ids = listed(params.logprob_token_ids)
    params.logprobs = 1 if params.logprobs is True else params.logprobs
    params.prompt_logprobs = 1 if params.prompt_logprobs is True else params.prompt_logprobs
    params.top_k = 0 if is_minus_1(params.top_k) else params.top_k
    params.seed = None if is_minus_1(params.seed) else params.seed
    if isinstance(params.logit_bias, dict):
        params.logit_bias = {as_token_id(token): bias for token, bias in params.logit_bias.items()}
    if isinstance(params.structured_outputs, dict):
        params.structured_outputs = StructuredOutputsParams.of(params.structured_outputs)
    if is_number(params.temperature) and 0 < params.temperature < MIN_TEMPERATURE:
        words = f"temperature {params.temperature} is below {MIN_TEMPERATURE}: {MIN_TEMPERATURE} is taken"
        warnings.warn(words, stacklevel=4)  # at the line that made the parameters
        params.temperature = MIN_TEMPERATURE


def listed(values: Any, nothing: list | None = None) -> Any:
    """A list of several values; what is not several stays as it is.

    >>> listed((1, 2)), listed(None, []), listed(5)
    ([1, 2], [], 5)
    """
    if values is None:
        return nothing
    values = values.tolist() if hasattr(values, "tolist") else values  # an array's numbers are its own
    if isinstance(values, str | bytes | dict) or not isinstance(values, Iterable):
        return values
    return [int(value) if is_whole(value) else value for value in values]


def unique(values: Any) -> Any:
    """
    >>> unique([3, 1, 3]), unique(5)
    ([3, 1], 5)
    """
    is_plain = isinstance(values, list) and all(isinstance(value, int | str) for value in values)
    return list(dict.fromkeys(values)) if is_plain else values  # any others are refused as they are


def as_token_id(token: Any) -> Any:
    """JSON has no other keys than texts.

    >>> as_token_id("17"), as_token_id(17), as_token_id("a")
    (17, 17, 'a')
    """
    return int(token) if is_whole(token) or (isinstance(token, str) and token.isdecimal()) else token


def is_minus_1(value: Any) -> bool:
    return is_whole(value) and value == -1
