"""What a caller may give as a prompt, made into what core takes: vLLM's forms, and arrays of token ids.

    a text | token ids | {"prompt": text} | {"prompt_token_ids": ids} | a list or tuple of these, mixed
    token ids are a list, a tuple, a numpy array or a tensor; an array of two dimensions is a prompt a row

A form that is none of these is an error that names its place: it never becomes an empty output.
"""

from collections import abc
from typing import Any, NotRequired, TypedDict

from ..core.checks import is_whole
from ..core.input_processor import Prompt
from .engine_args import nearest


class TextPrompt(TypedDict):
    prompt: str


class TokensPrompt(TypedDict):
    prompt_token_ids: list[int]
    prompt: NotRequired[str]  # the text of these tokens, if the output is to show one


PromptType = Prompt | TextPrompt | TokensPrompt
ParsedPrompt = str | list[int] | TokensPrompt  # what as_prompt() makes of it: a dictionary has ids, and their text
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
Message = dict[str, Any]  # a part of a conversation: {"role": "user", "content": "Hello"}


def as_prompts(prompts: Any) -> list[ParsedPrompt]:
    """One prompt, or several, as a list. Raises ValueError, naming the place, for what is no prompt.

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
    """A text or a list of ids; with a text beside its ids, a dictionary of both. Raises ValueError, naming it."""
    prompt = without_array(prompt)
    if isinstance(prompt, abc.Mapping):
        return from_mapping(dict(prompt), name)
    if isinstance(prompt, list | tuple):
        return whole_numbers(prompt, name)
    if not isinstance(prompt, str):
        raise ValueError(f"{name} must be a text, token ids or a dictionary, not {type(prompt).__name__}")
    return prompt


def from_mapping(prompt: dict[str, Any], name: str) -> ParsedPrompt:
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
    """An array or tensor as a list of numbers."""
    return value.tolist() if hasattr(value, "tolist") else value


def is_token_ids(value: Any) -> bool:
    """
    >>> is_token_ids([1, 2]), is_token_ids(["a"]), is_token_ids([]), is_token_ids([True])
    (True, False, False, False)
    """
    return isinstance(value, list | tuple) and len(value) > 0 and all(is_whole(without_array(each)) for each in value)


def whole_numbers(values: abc.Sequence[Any], name: str) -> list[int]:
    """Python's own, whatever library they came from."""
    numbers = [without_array(each) for each in values]
    for each in numbers:
        if not is_whole(each):
            raise ValueError(f"{name}: a token id must be a whole number, not {each!r}")
    return [int(each) for each in numbers]


def whole_text(text: str) -> str:
    """Raises ValueError, naming the place, if it has half of a character: no tokenizer takes that."""
    try:
        text.encode()
    except UnicodeEncodeError as half:
        raise ValueError(f"the prompt is no UTF-8 text: {text[half.start]!r} in place {half.start}") from None
    return text


def as_conversations(messages: Any, content_format: str = "auto") -> list[list[Message]]:
    """One conversation, or several, as a list. Raises ValueError, naming the place, for what is none.

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
    if not isinstance(messages, list | tuple) or not messages:
        raise ValueError(f"{name} must be a list of messages, at least one, not {messages!r}")
    for message in messages:
        if not isinstance(message, abc.Mapping) or "role" not in message:
            raise ValueError(f'{name}: a message must be a dictionary with a "role", not {message!r}')
        parts = message.get("content")
        for part in parts if isinstance(parts, list | tuple) else []:
            kind = part.get("type", "text") if isinstance(part, abc.Mapping) else "text"
            if "image" in str(kind) or "audio" in str(kind) or "video" in str(kind):
                raise ValueError(f"{name}: vLLM has parts of type {kind}, nanovllm has not: it reads text only")


def in_format(message: Message, content_format: str) -> Message:
    """
    >>> in_format({"role": "user", "content": [{"type": "text", "text": "a"}, "b"]}, "string")["content"]
    'a\\nb'
    """
    content = message.get("content")
    if content_format == "openai" and isinstance(content, str):
        content = [{"type": "text", "text": content}]
    elif content_format == "string" and isinstance(content, list | tuple):
        content = "\n".join(part if isinstance(part, str) else str(part.get("text", "")) for part in content)
    return {**message, "content": content} if "content" in message else {**message}
