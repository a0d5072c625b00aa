"""A file of requests, judged as a whole: {"requests": [...]}, or JSON lines, one request a line."""

import json
from collections import abc
from dataclasses import dataclass
from types import NoneType
from typing import Any, get_args, get_origin, get_type_hints

from ..api import SamplingParams
from ..core.input_processor import Prompt

NOT_OF_A_FILE = {"output_kind", "stream_interval", "skip_clone", "flat_logprobs"}  # a result is one whole output
PARAMS = {name: hint for name, hint in get_type_hints(SamplingParams).items() if name not in NOT_OF_A_FILE}
FIELDS = {"prompt": str | abc.Sequence[int], "id": str, **PARAMS}
WORDS = {
    int: "an integer",
    float: "a number",
    bool: "true or false",
    str: "a text",
    NoneType: "null",
    abc.Sequence[int]: "a list of integers",
    list[int]: "a list of integers",
    list[str]: "a list of texts",
}


@dataclass(frozen=True)
class Request:
    id: str
    index: int  # its place in the file, from 0
    prompt: Prompt
    params: SamplingParams


def read_requests(text: str, defaults: dict[str, Any]) -> list[Request]:
    """All requests of a file; `defaults` are the parameters of those that do not say.

    Raises ValueError for the first that is wrong, naming its place, the field and the value.
    """
    requests: dict[str, Request] = {}  # by id
    for index, (line, value) in enumerate(values(text)):
        try:
            request = read_request(index, value, defaults)
            if request.id in requests:
                raise ValueError(f"id {request.id!r} is taken by request {requests[request.id].index}")
        except ValueError as error:
            raise ValueError(f"request {index}{line}: {error}") from None
        requests[request.id] = request
    if not requests:
        raise ValueError("there are no requests in it")
    return list(requests.values())


def values(text: str) -> list[tuple[str, Any]]:
    """What should be requests; those of JSON lines each with its line."""
    if not text.strip():
        return []
    try:
        whole = json.loads(text)
    except json.JSONDecodeError as error:
        if error.msg != "Extra data":
            raise no_json(error) from None
        lines = enumerate(text.split("\n"), start=1)
        return [(f" (line {number})", parse(line, number)) for number, line in lines if line.strip()]
    if not isinstance(whole, dict) or "requests" not in whole:
        return [("", whole)]
    if len(whole) > 1:
        raise ValueError(f'beside "requests" there may be nothing else, and there is {shortened([*whole])}')
    if not isinstance(whole["requests"], list):
        raise ValueError(f'"requests" must be a list, not {shortened(whole["requests"])}')
    return [("", value) for value in whole["requests"]]


def parse(text: str, line: int) -> Any:
    """The value of JSON in this line of the file."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise no_json(error, line) from None


def no_json(error: json.JSONDecodeError, line: int = 1) -> ValueError:
    """For a text that begins in this line of the file."""
    return ValueError(f"line {line + error.lineno - 1}, column {error.colno}: no JSON: {error.msg}")


def read_request(index: int, value: Any, defaults: dict[str, Any]) -> Request:
    if not isinstance(value, dict):
        raise ValueError(f"a request must be an object with a prompt, not {shortened(value)}")
    for name, given in value.items():
        if name not in FIELDS:
            raise ValueError(f"unknown field {name!r}: a request may have {', '.join(FIELDS)}")
        if not fits(given, FIELDS[name]):
            raise ValueError(f"{name} must be {words(FIELDS[name])}, not {shortened(given)}")
    if "prompt" not in value:
        raise ValueError("it has no prompt")
    given = {name: each for name, each in value.items() if name not in ("prompt", "id")}
    return Request(value.get("id", str(index)), index, value["prompt"], SamplingParams(**(defaults | given)))


def fits(value: Any, hint: Any) -> bool:
    """Whether a value of JSON is of this type.

    >>> fits(1, float), fits(True, int), fits(["a", "b"], str | list[str]), fits([1, "b"], list[int])
    (True, False, True, False)
    """
    if hint is Any or get_origin(hint) is dict:
        return hint is Any or isinstance(value, dict)
    if get_origin(hint) in (abc.Sequence, list):
        return isinstance(value, list) and all(fits(each, *get_args(hint)) for each in value)
    if get_args(hint):
        return any(fits(value, each) for each in get_args(hint))
    return type(value) in ((int, float) if hint is float else (hint,))


def words(hint: Any) -> str:
    """
    >>> words(int | None), words(str | list[str])
    ('an integer or null', 'a text or a list of texts')
    """
    kinds = (hint,) if hint in WORDS else get_args(hint) or (hint,)
    return " or ".join(WORDS.get(kind, "an object") for kind in kinds)


def shortened(value: Any) -> str:
    """A value as the file has it, or the beginning of it."""
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else text[:57] + "..."
