"""A file of requests, judged as a whole: {"requests": [...]}, or JSON lines, one request a line."""

import json
import re
from collections import abc
from collections.abc import Iterator
from dataclasses import dataclass
from types import NoneType
from typing import Any, get_args, get_origin, get_type_hints

from .input_processor import Prompt
from .sampling import SamplingParams

FIELDS = {"prompt": str | abc.Sequence[int], "id": str, **get_type_hints(SamplingParams)}
WORDS = {
    int: "an integer",
    float: "a number",
    bool: "true or false",
    str: "a text",
    NoneType: "null",
    abc.Sequence[int]: "a list of integers",
    abc.Sequence[str]: "a list of texts",
}
DOCUMENT = re.compile(r'\s*\{\s*"requests"\s*:\s*')  # how a file begins that is one value of JSON
BETWEEN, END = re.compile(r"[\s,]*"), re.compile(r"\s*\]\s*\}\s*\Z")


@dataclass(frozen=True)
class Request:
    id: str
    index: int  # its place in the file, from 0
    prompt: Prompt
    params: SamplingParams


def read_requests(text: str, defaults: dict[str, Any]) -> list[Request]:
    """All requests of a file; `defaults` are the parameters of those that do not say.

    Raises ValueError for the first that is wrong, naming its line, its place, the field and the value.
    """
    requests: dict[str, Request] = {}  # by id
    for index, (line, value) in enumerate(values(text)):
        try:
            request = read_request(index, value, defaults)
            if request.id in requests:
                raise ValueError(f"id {request.id!r} is taken by request {requests[request.id].index}")
        except ValueError as error:
            raise ValueError(f"request {index} (line {line}): {error}") from None
        requests[request.id] = request
    if not requests:
        raise ValueError("there are no requests in it")
    return list(requests.values())


def values(text: str) -> Iterator[tuple[int, Any]]:
    """What should be requests, each with the line that it begins in."""
    start = DOCUMENT.match(text)
    if not start:
        lines = enumerate(text.split("\n"), start=1)
        yield from ((number, parse(line, number)) for number, line in lines if line.strip())
        return
    if not isinstance(parse(text)["requests"], list):
        raise ValueError('"requests" must be a list')
    place, line = start.end() + 1, 1 + text.count("\n", 0, start.end())
    while not END.match(text, place):
        begin = BETWEEN.match(text, place).end()
        line += text.count("\n", place, begin)
        if text[begin] == "]":
            raise ValueError('beside "requests" there may be nothing else')
        value, place = json.JSONDecoder().raw_decode(text, begin)
        yield line, value
        line += text.count("\n", begin, place)


def parse(text: str, line: int = 1) -> Any:
    """A value of JSON that begins in that line of the file."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"line {line + error.lineno - 1}, column {error.colno}: no JSON: {error.msg}") from None


def read_request(index: int, value: Any, defaults: dict[str, Any]) -> Request:
    if not isinstance(value, dict):
        raise ValueError(f"a request must be an object with a prompt, not {shortened(value)}")
    for name, given in value.items():
        if name not in FIELDS:
            raise ValueError(f"unknown field {name!r}: a request may have {', '.join(FIELDS)}")
        if not fits(given, FIELDS[name]):
            raise ValueError(f"{name} must be {words(FIELDS[name])}, not {shortened(given)}")
    json.dumps(value, ensure_ascii=False).encode()  # ValueError for half a character, which no tokenizer takes
    if "prompt" not in value:
        raise ValueError("it has no prompt")
    given = {name: each for name, each in value.items() if name not in ("prompt", "id")}
    return Request(value.get("id", str(index)), index, value["prompt"], SamplingParams(**(defaults | given)))


def fits(value: Any, hint: Any) -> bool:
    """Whether a value of JSON is of this type.

    >>> fits(1, float), fits(True, int), fits(["a", "b"], str | abc.Sequence[str]), fits([1, "b"], abc.Sequence[int])
    (True, False, True, False)
    """
    if get_origin(hint) is abc.Sequence:
        return isinstance(value, list) and all(fits(each, *get_args(hint)) for each in value)
    if get_args(hint):
        return any(fits(value, each) for each in get_args(hint))
    return type(value) in ((int, float) if hint is float else (hint,))


def words(hint: Any) -> str:
    """
    >>> words(int | None), words(str | abc.Sequence[str])
    ('an integer or null', 'a text or a list of texts')
    """
    return WORDS[hint] if hint in WORDS else " or ".join(WORDS[each] for each in get_args(hint))


def shortened(value: Any) -> str:
    """A value as the file has it, or the beginning of it."""
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else text[:57] + "..."
