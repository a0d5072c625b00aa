"""The choices of an answer, and what it cost."""

from collections.abc import Sequence
from typing import Any, Protocol

from .logprobs import chat_logprobs, completion_logprobs, prompt_logprobs


class Sample(Protocol):
    """An output, or what is new in one."""

    @property
    def text(self) -> str: ...
    @property
    def token_ids(self) -> list[int]: ...
    @property
    def logprobs(self) -> Any: ...
    @property
    def finish_reason(self) -> str | None: ...
    @property
    def stop_reason(self) -> str | int | None: ...


def completion_choice(sample: Sample, index: int, start: int = 0) -> dict[str, Any]:
    """`start` is where in the whole text the sample's begins."""
    told = None if sample.logprobs is None else completion_logprobs(sample.token_ids, sample.logprobs, start)
    return {"index": index, "text": sample.text, "logprobs": told} | ending(sample)


def chat_choice(sample: Sample, index: int, count: int | None) -> dict[str, Any]:
    """`count` of the likeliest tokens are told of each place, if any are."""
    message = {"role": "assistant", "content": sample.text, "refusal": None}
    return {"index": index, "message": message, "logprobs": told_of_chat(sample, count)} | ending(sample)


def chat_chunk_choice(sample: Sample, index: int, count: int | None) -> dict[str, Any]:
    """The same for what is new in a stream."""
    delta = {"content": sample.text}
    return {"index": index, "delta": delta, "logprobs": told_of_chat(sample, count)} | ending(sample)


def told_of_chat(sample: Sample, count: int | None) -> dict[str, Any] | None:
    if sample.logprobs is None:
        return None
    return {"content": chat_logprobs(sample.token_ids, sample.logprobs, count or 0), "refusal": None}


def told_of_prompt(places: Sequence[Any] | None) -> dict[str, Any]:
    """In each choice of a completion, and beside those of a chat."""
    return {} if places is None else {"prompt_logprobs": prompt_logprobs(places)}


def ending(sample: Sample) -> dict[str, Any]:
    return {"finish_reason": sample.finish_reason, "stop_reason": sample.stop_reason}


def usage(num_prompt_tokens: int, num_completion_tokens: int, num_cached_tokens: int) -> dict[str, Any]:
    """
    >>> usage(3, 2, 0)["total_tokens"]
    5
    """
    return {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_completion_tokens,
        "total_tokens": num_prompt_tokens + num_completion_tokens,
        "prompt_tokens_details": {"cached_tokens": num_cached_tokens},
    }
