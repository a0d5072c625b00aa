"""Check prompts and conversations in any of vLLM's forms, and convert them to plain Python values.

    text | token ids | {"prompt": text} | {"prompt_token_ids": ids} | a list or tuple of these

A dictionary may also have a "cache_salt": prompts with different salts share no blocks of the prefix cache.
Token ids are a list, a tuple, a numpy array or a tensor. A two-dimensional array holds one prompt per row. A value in
any other form raises a ValueError that names its position.
"""

from collections import abc
from typing import Any, NotRequired, TypedDict, final

from ..checkpoints.chat_template import content_text
from ..checks import did_you_mean, is_integer


@final
class TextPrompt(TypedDict):
    prompt: str
    cache_salt: NotRequired[str]


@final
class TokensPrompt(TypedDict):
    prompt_token_ids: list[int]
    prompt: NotRequired[str]  # the text of these tokens, to show in the output
    cache_salt: NotRequired[str]


Prompt = str | list[int]  # text, which gets BOS, or token ids, which are used unchanged
PromptType = Prompt | TextPrompt | TokensPrompt
ParsedPrompt = PromptType  # the result of as_prompt(), with Python's own lists and integers
Message = dict[str, Any]  # {"role": "user", "content": "Hello"}
PROMPT_FIELDS = ["prompt", "prompt_token_ids", "cache_salt"]


def as_prompts(prompts: Any) -> list[ParsedPrompt]:
    """Return a list of prompts, given one prompt or several. Raise ValueError for an invalid prompt.

    >>> as_prompts("a"), as_prompts((1, 2)), as_prompts(["a", {"prompt_token_ids": [3]}, [4, 5]])
    (['a'], [[1, 2]], ['a', [3], [4, 5]])
    """
    prompts = array_to_list(prompts)
    if isinstance(prompts, str | dict) or looks_like_token_ids(prompts):
        return [as_prompt(prompts)]
    if not isinstance(prompts, list | tuple):
        raise ValueError(f"prompts must be text, token ids or a list of prompts, got {type(prompts).__name__}")
    return [as_prompt(prompt, f"prompt {i}") for i, prompt in enumerate(prompts)]


def as_prompt(prompt: Any, name: str = "the prompt") -> ParsedPrompt:
    """Return a prompt as text, token ids or a dictionary. Raise ValueError, which shows `name`, if it is invalid."""
    prompt = array_to_list(prompt)
    if isinstance(prompt, abc.Mapping):
        return from_mapping(dict(prompt), name)
    if isinstance(prompt, list | tuple):
        return as_token_ids(prompt, name)
    if not isinstance(prompt, str):
        raise ValueError(f"{name} must be text, token ids or a dictionary, got {type(prompt).__name__}")
    return prompt


def from_mapping(prompt: dict[str, Any], name: str) -> ParsedPrompt:
    """Return a prompt, given in vLLM's dictionary form. Fields that are None count as unset.

    Raise ValueError, which shows `name`, for an invalid prompt.
    """
    for field, value in prompt.items():
        if field not in PROMPT_FIELDS and value is not None:
            raise ValueError(f"{name}: field {field!r} is unsupported{did_you_mean(str(field), PROMPT_FIELDS)}")
    text, token_ids = prompt.get("prompt"), array_to_list(prompt.get("prompt_token_ids"))
    salt = prompt.get("cache_salt")
    if salt is not None and not (isinstance(salt, str) and salt):
        raise ValueError(f"{name}: cache_salt must be a non-empty string, got {salt!r}")
    if token_ids is None:
        if not isinstance(text, str):
            raise ValueError(f'{name} needs text in "prompt" or token ids in "prompt_token_ids", got {[*prompt]}')
        return TextPrompt(prompt=text, cache_salt=salt) if salt else text
    if not isinstance(token_ids, list | tuple):
        raise ValueError(f"{name}: prompt_token_ids must be a list of token ids, got {type(token_ids).__name__}")
    parsed = TokensPrompt(prompt_token_ids=as_token_ids(token_ids, name))
    if isinstance(text, str):
        parsed["prompt"] = text
    if salt:
        parsed["cache_salt"] = salt
    return parsed if len(parsed) > 1 else parsed["prompt_token_ids"]


def parts_of(prompt: ParsedPrompt) -> tuple[Prompt, str | None, str | None]:
    """Return a prompt's text or token ids, the text to show for token ids, and the cache_salt.

    >>> parts_of("a"), parts_of({"prompt_token_ids": [5], "prompt": "b", "cache_salt": "s"})
    (('a', None, None), ([5], 'b', 's'))
    """
    if not isinstance(prompt, dict):
        return prompt, None, None
    if "prompt_token_ids" in prompt:
        return prompt["prompt_token_ids"], prompt.get("prompt"), prompt.get("cache_salt")
    return prompt["prompt"], None, prompt.get("cache_salt")


def array_to_list(value: Any) -> Any:
    """Return an array or a tensor as numbers in nested lists, and any other value unchanged."""
    return value.tolist() if hasattr(value, "tolist") else value


def looks_like_token_ids(value: Any) -> bool:
    """Return True if `value` looks like one prompt of token ids: a list or tuple that starts with a number.

    >>> looks_like_token_ids([1, 2.5]), looks_like_token_ids(["a", 1]), looks_like_token_ids([])
    (True, False, False)
    """
    is_sequence = isinstance(value, list | tuple) and len(value) > 0
    return is_sequence and isinstance(array_to_list(value[0]), int | float)


def as_token_ids(values: abc.Sequence[Any], name: str) -> list[int]:
    """Return token ids as Python ints, whichever library they come from. Raise ValueError for anything else."""
    if {*map(type, values)} <= {int}:  # the usual case
        return [*values]
    token_ids = [array_to_list(value) for value in values]
    for token_id in token_ids:
        if not is_integer(token_id):
            raise ValueError(f"{name}: a token id must be an integer, got {token_id!r}")
    return [int(token_id) for token_id in token_ids]


def checked_options(name: str, options: Any) -> dict[str, Any]:
    """Return a copy of `options`, which is the argument `name`. Raise ValueError unless it is a dictionary or None.

    >>> checked_options("tokenization_kwargs", None), checked_options("chat_template_kwargs", {"a": 1})
    ({}, {'a': 1})
    """
    if options is None:
        return {}
    if not isinstance(options, abc.Mapping) or not all(isinstance(key, str) for key in options):
        raise ValueError(f"{name} must be a dictionary with string keys, got {options!r}")
    return dict(options)


def valid_text(text: str) -> str:
    """Return `text`. Raise ValueError if it contains a lone surrogate (half a character), which tokenizers reject."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"the prompt is not valid Unicode: {text[error.start]!r} at index {error.start}") from None
    return text


def as_conversations(messages: Any, content_format: str = "auto") -> list[list[Message]]:
    """Return a list of conversations, given one or several. Raise ValueError for an invalid conversation.

    The content of a message is text or, as OpenAI's clients send it, a list of parts. The format "string" joins the
    parts into one text, each on its own line; "openai" turns text into a list of one part; "auto" changes nothing.
    """
    if content_format not in ("auto", "string", "openai"):
        raise ValueError(f"chat_template_content_format must be auto, string or openai, got {content_format!r}")
    if not isinstance(messages, list | tuple):
        raise ValueError(f"messages must be a list of messages or of conversations, got {type(messages).__name__}")
    is_single = bool(messages) and all(isinstance(message, abc.Mapping) for message in messages)
    conversations = [messages] if is_single else messages
    for i, conversation in enumerate(conversations):
        check_conversation(conversation, f"conversation {i}")
    return [[with_content(message, content_format) for message in conversation] for conversation in conversations]


def check_conversation(messages: Any, name: str) -> None:
    """Raise ValueError, which shows `name`, unless `messages` is one valid conversation."""
    if not isinstance(messages, list | tuple) or not messages:
        raise ValueError(f"{name} must be a non-empty list of messages, got {messages!r}")
    for i, message in enumerate(messages):
        if not isinstance(message, abc.Mapping) or not isinstance(message.get("role"), str):
            raise ValueError(f'{name}: a message must be a dictionary with a string "role", got {message!r}')
        if isinstance(content := message.get("content"), str | None):
            continue
        if not isinstance(content, list | tuple):
            kind = type(content).__name__
            raise ValueError(f"{name}, message {i}: content must be a string or a list of parts, got {kind}")
        content_text(content, f"{name}, message {i}")  # raises for a part that is not text


def with_content(message: Message, content_format: str) -> Message:
    r"""Return a copy of the message, with its content in the format "string" or "openai" if that is `content_format`.

    >>> with_content({"role": "user", "content": [{"type": "text", "text": "a"}, "b"]}, "string")["content"]
    'a\nb'
    """
    content = message.get("content")
    if content_format == "openai" and isinstance(content, str):
        content = [{"type": "text", "text": content}]
    elif content_format == "string" and isinstance(content, list | tuple):
        content = content_text(content, "content")
    return {**message, "content": content} if "content" in message else {**message}
