"""A body read: what it asks for, in this engine's terms."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

from ...engine.prompts import Prompt
from .chats import Chat, chat_of
from .fields import CHAT, COMPLETIONS, check_body, check_names
from .json_values import read_field
from .params import chat_params, completion_params

STREAM_OPTIONS = {"include_usage": bool, "continuous_usage_stats": bool, "include_obfuscation": bool}


class Unsaid(NamedTuple):
    """What a body does not say."""

    params: Mapping[str, Any] = MappingProxyType({})  # as whoever runs the engine wants it
    recommended: Mapping[str, Any] = MappingProxyType({})  # by the checkpoint


class StreamOptions(NamedTuple):
    include_usage: bool = False  # in an event of its own, the last
    continuous_usage_stats: bool = False  # and so far, in each


@dataclass(frozen=True)
class Body:
    url: str
    model: str | None
    prompts: list[Prompt] | Chat
    params: dict[str, Any]  # of SamplingParams
    stream: StreamOptions | None  # None: the answer is one whole object
    echo: bool  # the prompt's text comes before the output's
    add_special_tokens: bool  # to a prompt that is a text

    @property
    def is_chat(self) -> bool:
        return self.url == CHAT


def read_body(url: str, body: dict[str, Any], unsaid: Unsaid) -> Body:
    """Raises ValueError, naming the field and the value. null is as good as not said."""
    body = {name: each for name, each in body.items() if each is not None}
    check_body(body, url)
    is_chat, stream = url == CHAT, stream_of(body)
    if stream and "prompt_logprobs" in body:
        raise ValueError("prompt_logprobs needs stream to be false")
    given = chat_params(body) if is_chat else completion_params(body)
    no_limit = {"max_tokens": None} if is_chat else {}  # of its own: up to the model's
    return Body(
        url=url,
        model=read_field("model", body.get("model"), str | None),
        prompts=chat_of(body) if is_chat else prompts_of(body),
        params={**unsaid.recommended, **no_limit, **unsaid.params, **given},
        stream=stream,
        echo=read_field("echo", body.get("echo", False), bool),
        add_special_tokens=read_field("add_special_tokens", body.get("add_special_tokens", not is_chat), bool),
    )


def prompts_of(body: dict[str, Any]) -> list[Prompt]:
    """One prompt, a text or token ids, or a list of such."""
    if "prompt" not in body:
        raise ValueError("its body has no prompt")
    prompt = body["prompt"]
    is_several = isinstance(prompt, list) and prompt and not isinstance(prompt[0], int)
    if not is_several:
        return [read_field("prompt", prompt, str | list[int])]
    return [read_field(f"prompt[{i}]", each, str | list[int]) for i, each in enumerate(prompt)]


def stream_of(body: dict[str, Any]) -> StreamOptions | None:
    is_streamed = read_field("stream", body.get("stream", False), bool)
    given = read_field("stream_options", body.get("stream_options", {}), dict)
    if given and not is_streamed:
        raise ValueError("stream_options needs stream to be true")
    check_names(given, STREAM_OPTIONS, "stream_options may have")
    options = {name: read_field(f"stream_options.{name}", each, bool | None) for name, each in given.items()}
    if options.get("include_obfuscation"):
        raise ValueError("stream_options.include_obfuscation true is not served here: leave it out")
    told = {name: bool(options.get(name)) for name in StreamOptions._fields}
    return StreamOptions(**told) if is_streamed else None


__all__ = ["CHAT", "COMPLETIONS", "Body", "StreamOptions", "Unsaid", "prompts_of", "read_body"]
