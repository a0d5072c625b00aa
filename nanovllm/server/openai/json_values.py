"""Values of JSON for the fields of a dataclass: a type that does not fit is told in words of JSON."""

import json
from collections import abc
from dataclasses import is_dataclass
from itertools import islice
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

WORDS = {
    int: "an integer",
    float: "a number",
    bool: "true or false",
    str: "a text",
    NoneType: "null",
    dict: "an object",
    list: "a list",
}
SIMPLE: dict[Any, set[type]] = {int: {int}, float: {int, float}, str: {str}, bool: {bool}, dict: {dict}}
MANY = {int: "integers", float: "numbers", str: "texts", dict: "objects"}


def read_field(name: str, value: Any, hint: Any) -> Any:
    """The value as Python has it: keys that are numbers, and objects that are dataclasses, are made here.

    >>> read_field("logit_bias", {"5": 1}, dict[int, float] | None)
    {5: 1}

    Raises ValueError, naming the field and the value.
    """
    for kind in kinds_of(hint):
        if fits(value, kind):
            return made(name, value, kind)
    raise ValueError(f"{name} must be {words(hint)}, not {shortened(value)}")


def made(name: str, value: Any, kind: Any) -> Any:
    if isinstance(kind, type) and is_dataclass(kind):
        return read_object(name, value, kind)
    if get_origin(kind) in (dict, abc.Mapping) and get_args(kind)[0] is int:
        return {int(key): each for key, each in value.items()}
    return value


def read_object(name: str, value: dict[str, Any], kind: type) -> Any:
    hints = {field: hint for field, hint in get_type_hints(kind).items() if not field.startswith("_")}
    for field in value:
        if field not in hints:
            raise ValueError(f"unknown field {field!r} in {name}: it may have {', '.join(hints)}")
    return kind(**{field: read_field(f"{name}.{field}", each, hints[field]) for field, each in value.items()})


def fits(value: Any, hint: Any) -> bool:
    """Whether a value of JSON is of this type.

    >>> fits(1, float), fits(True, int), fits(["a", "b"], str | abc.Sequence[str]), fits([1, "b"], abc.Sequence[int])
    (True, False, True, False)
    >>> fits({"7": 0.5}, dict[int, float]), fits({"a": 0.5}, dict[int, float])
    (True, False)
    """
    if hint is Any:
        return True
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return any(fits(value, each) for each in inner)
    if origin in (list, abc.Sequence):
        if isinstance(value, list) and inner[0] in SIMPLE:  # a million tokens are looked at in a moment
            return {*map(type, value)} <= SIMPLE[inner[0]]
        return isinstance(value, list) and all(fits(each, *inner) for each in value)
    if origin in (dict, abc.Mapping):
        key, kind = inner
        return isinstance(value, dict) and all(is_key(each, key) and fits(of, kind) for each, of in value.items())
    if is_dataclass(hint):
        return isinstance(value, dict)
    return type(value) in ((int, float) if hint is float else (hint,))


def is_key(text: str, kind: type) -> bool:
    """The keys of JSON are texts: of an integer, its digits."""
    return kind is str or (text.isdecimal() and text.isascii() and len(text) < 20)


def words(hint: Any) -> str:
    """
    >>> words(int | None), words(str | abc.Sequence[str]), words(dict[int, float])
    ('an integer or null', 'a text or a list of texts', 'an object of numbers')
    """
    return " or ".join(dict.fromkeys(map(words_of, kinds_of(hint))))


def words_of(kind: Any) -> str:
    origin, inner = get_origin(kind), get_args(kind)
    of = f" of {MANY[inner[-1]]}" if inner and inner[-1] in MANY else ""
    if origin in (list, abc.Sequence):
        return WORDS[list] + of
    if origin in (dict, abc.Mapping) or is_dataclass(kind):
        return WORDS[dict] + of
    return WORDS.get(kind, "a value")


def kinds_of(hint: Any) -> tuple[Any, ...]:
    """
    >>> kinds_of(int | None), kinds_of(str)
    ((<class 'int'>, <class 'NoneType'>), (<class 'str'>,))
    """
    return get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)


def shortened(value: Any) -> str:
    """A value as the file has it, or the beginning of it."""
    pieces = json.JSONEncoder(ensure_ascii=False).iterencode(value)
    text = "".join(islice(pieces, 61))  # of a large value the rest is not made
    return text if len(text) <= 60 else text[:57] + "..."
