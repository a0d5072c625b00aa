"""What a caller may give as a prompt, made into what core takes: vLLM's forms, and arrays of token ids.

    a text | token ids | {"prompt": text} | {"prompt_token_ids": ids} | a list or tuple of these, mixed
    token ids are a list, a tuple, a numpy array or a tensor; an array of two dimensions is a prompt a row

A form that is none of these is an error that names its place: it never becomes an empty output.
"""

from collections import abc
from typing import Any, NotRequired, TypedDict

from ..engine.checks import is_whole
from ..engine.input_processor import Prompt
from .engine_args_checks import nearest


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
    """Whether it is one prompt of token ids, right or wrong: a list that begins with a number.

    >>> is_token_ids([1, 2]), is_token_ids([1, 2.5]), is_token_ids(["a", 1]), is_token_ids([])
    (True, True, False, False)
    """
    return isinstance(value, list | tuple) and len(value) > 0 and isinstance(without_array(value[0]), int | float)


def whole_numbers(values: abc.Sequence[Any], name: str) -> list[int]:
    """Python's own, whatever library they came from."""
    numbers = [without_array(each) for each in values]
    for each in numbers:
        if not is_whole(each):
            raise ValueError(f"{name}: a token id must be a whole number, not {each!r}")
    return [int(each) for each in numbers]


def options_of(name: str, options: Any) -> dict[str, Any]:
    """The options that a call passes on under `name`. Raises ValueError if they are no dictionary with names.

    >>> options_of("tokenization_kwargs", None), options_of("tokenization_kwargs", {"add_special_tokens": False})
    ({}, {'add_special_tokens': False})
    """
    if options is None:
        return {}
    if not isinstance(options, abc.Mapping) or not all(isinstance(each, str) for each in options):
        raise ValueError(f"{name} must be a dictionary of names and values, not {options!r}")
    return dict(options)


def whole_text(text: str) -> str:
    """Raises ValueError, naming the place, if it has half of a character: no tokenizer takes that."""
    try:
        text.encode()
    except UnicodeEncodeError as half:
        raise ValueError(f"the prompt is no UTF-8 text: {text[half.start]!r} in place {half.start}") from None
    return text
