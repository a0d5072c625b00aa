"""Prompts and conversations as callers give them, made into texts and token ids: vLLM's forms, and arrays.

    a text | token ids | {"prompt": text} | {"prompt_token_ids": ids} | a list or tuple of these, mixed
    token ids are a list, a tuple, a numpy array or a tensor; an array of two dimensions is a prompt a row

A form that is none of these is an error that names its place: it never becomes an empty output.
"""

from collections import abc
from typing import Any, NotRequired, TypedDict

from ..checkpoints.chat_template import content_text
from .checks import is_whole, nearest


class TextPrompt(TypedDict):
    prompt: str


class TokensPrompt(TypedDict):
    prompt_token_ids: list[int]
    prompt: NotRequired[str]  # the text of these tokens, if the output is to show one


Prompt = str | list[int]  # a text (BOS is put before it) or token ids (taken as they are)
PromptType = Prompt | TextPrompt | TokensPrompt
ParsedPrompt = str | list[int] | TokensPrompt  # what as_prompt() makes of it: a dictionary has ids, and their text
Message = dict[str, Any]  # {"role": "user", "content": "Hello"}
FIELDS = ("prompt", "prompt_token_ids")
ONLY_IN_VLLM = {
    "multi_modal_data": "it reads text only",
    "multi_modal_uuids": "it reads text only",
    "mm_processor_kwargs": "it reads text only",
    "media_io_kwargs": "it reads text only",
    "prompt_embeds": "a prompt is a text or token ids",
    "encoder_prompt": "its models have no encoder",
    "decoder_prompt": "its models have no encoder",
    "cache_salt": "all requests share one prefix cache",
    "token_type_ids": "its models have one type of token",
    "prompt_token_offsets": "a prompt is a text or token ids",
}


def as_prompts(prompts: Any) -> list[ParsedPrompt]:
    """Return one prompt, or several, as a list. Raise ValueError, naming the place, for a value that is no prompt.

    >>> as_prompts("a"), as_prompts((1, 2)), as_prompts(["a", {"prompt_token_ids": [3]}, [4, 5]])
    (['a'], [[1, 2]], ['a', [3], [4, 5]])
    """
    prompts = without_array(prompts)
    if isinstance(prompts, str | dict) or is_token_ids(prompts):
        return [as_prompt(prompts)]
    if not isinstance(prompts, list | tuple):
        raise ValueError(f"prompts must be a text, token ids or a list of such prompts, not {type(prompts).__name__}")
    return [as_prompt(prompt, f"prompt {i}") for i, prompt in enumerate(prompts)]


def as_prompt(prompt: Any, name: str = "the prompt") -> ParsedPrompt:
    """Return a text or a list of ids; for a text beside its ids, a dictionary of both. Raise ValueError, naming it."""
    prompt = without_array(prompt)
    if isinstance(prompt, abc.Mapping):
        return from_mapping(dict(prompt), name)
    if isinstance(prompt, list | tuple):
        return whole_numbers(prompt, name)
    if not isinstance(prompt, str):
        raise ValueError(f"{name} must be a text, token ids or a dictionary, not {type(prompt).__name__}")
    return prompt


def from_mapping(prompt: dict[str, Any], name: str) -> ParsedPrompt:
    """Read a prompt in vLLM's dictionary form."""
    for field, value in prompt.items():
        if field in ONLY_IN_VLLM and value is not None:
            raise ValueError(f"{name}: vLLM has {field}, nanovllm has not: {ONLY_IN_VLLM[field]}")
        if field not in FIELDS and field not in ONLY_IN_VLLM:
            raise ValueError(f"{name} has a field {field!r}{nearest(str(field), [*FIELDS])}")
    text, token_ids = prompt.get("prompt"), without_array(prompt.get("prompt_token_ids"))
    if token_ids is None and not isinstance(text, str):
        raise ValueError(f'{name} needs a text as "prompt" or token ids as "prompt_token_ids", and has {[*prompt]}')
    if token_ids is None:
        return text
    if not isinstance(token_ids, list | tuple):
        raise ValueError(f"{name}: prompt_token_ids must be token ids, not {type(token_ids).__name__}")
    ids = whole_numbers(token_ids, name)
    return TokensPrompt(prompt_token_ids=ids, prompt=text) if isinstance(text, str) else ids


def without_array(value: Any) -> Any:
    """Return an array or tensor as a list of numbers, and other values as they are."""
    return value.tolist() if hasattr(value, "tolist") else value


def is_token_ids(value: Any) -> bool:
    """Return whether `value` is one prompt of token ids, right or wrong: a list that begins with a number.

    >>> is_token_ids([1, 2]), is_token_ids([1, 2.5]), is_token_ids(["a", 1]), is_token_ids([])
    (True, True, False, False)
    """
    return isinstance(value, list | tuple) and len(value) > 0 and isinstance(without_array(value[0]), int | float)


def whole_numbers(values: abc.Sequence[Any], name: str) -> list[int]:
    """Return the token ids as Python's own ints, whatever library they came from."""
    numbers = [without_array(each) for each in values]
    for each in numbers:
        if not is_whole(each):
            raise ValueError(f"{name}: a token id must be a whole number, not {each!r}")
    return [int(each) for each in numbers]


def options_of(name: str, options: Any) -> dict[str, Any]:
    """Return the options that a call passes on under `name`. Raise ValueError if they are no dictionary with names.

    >>> options_of("tokenization_kwargs", None), options_of("tokenization_kwargs", {"add_special_tokens": False})
    ({}, {'add_special_tokens': False})
    """
    if options is None:
        return {}
    if not isinstance(options, abc.Mapping) or not all(isinstance(each, str) for each in options):
        raise ValueError(f"{name} must be a dictionary of names and values, not {options!r}")
    return dict(options)


def whole_text(text: str) -> str:
    """Return `text`. Raise ValueError, naming the place, if it has half of a character: no tokenizer takes that."""
    try:
        text.encode()
    except UnicodeEncodeError as half:
        raise ValueError(f"the prompt is no UTF-8 text: {text[half.start]!r} in place {half.start}") from None
    return text


def as_conversations(messages: Any, content_format: str = "auto") -> list[list[Message]]:
    """Return one conversation, or several, as a list. Raise ValueError, naming the place, for a value that is none.

    A content may be parts, as OpenAI's clients write it. The format "string" makes one text of them, a part a line,
    "openai" makes parts of a text, and "auto" leaves it to the template.
    """
    if content_format not in ("auto", "string", "openai"):
        raise ValueError(f"chat_template_content_format must be auto, string or openai, not {content_format!r}")
    if not isinstance(messages, list | tuple):
        raise ValueError(f"messages must be a list of messages or of conversations, not {type(messages).__name__}")
    is_one = bool(messages) and all(isinstance(message, abc.Mapping) for message in messages)
    conversations = [messages] if is_one else messages
    for i, conversation in enumerate(conversations):
        check_conversation(conversation, f"conversation {i}")
    return [[in_format(message, content_format) for message in conversation] for conversation in conversations]


def check_conversation(messages: Any, name: str) -> None:
    """Raise ValueError, naming the place, unless `messages` are the messages of one conversation."""
    if not isinstance(messages, list | tuple) or not messages:
        raise ValueError(f"{name} must be a list of messages, at least one, not {messages!r}")
    for i, message in enumerate(messages):
        if not isinstance(message, abc.Mapping) or not isinstance(message.get("role"), str):
            raise ValueError(f'{name}: a message must be a dictionary with a text as its "role", not {message!r}')
        if isinstance(content := message.get("content"), str | None):
            continue
        if not isinstance(content, list | tuple):
            kind = type(content).__name__
            raise ValueError(f"{name}, message {i}: content must be a text or a list of parts, not {kind}")
        content_text(content, f"{name}, message {i}")  # raises for a part that is no text


def in_format(message: Message, content_format: str) -> Message:
    """Return the message with its content in the format "string" or "openai".

    >>> in_format({"role": "user", "content": [{"type": "text", "text": "a"}, "b"]}, "string")["content"]
    'a\\nb'
    """
    content = message.get("content")
    if content_format == "openai" and isinstance(content, str):
        content = [{"type": "text", "text": content}]
    elif content_format == "string" and isinstance(content, list | tuple):
        content = content_text(content, "content")
    return {**message, "content": content} if "content" in message else {**message}
