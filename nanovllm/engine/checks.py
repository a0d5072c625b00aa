"""check_fields: what a caller gave for the fields of a dataclass, against their types and a table of rules."""

import math
from collections.abc import Callable, Sequence
from dataclasses import Field, fields
from numbers import Integral, Real
from types import NoneType
from typing import Any, get_args

Rule = tuple[str, Callable[[Any], bool]]  # what a value must be, in the words of the error; and whether it is

AT_LEAST_1: Rule = ("a whole number, at least 1", lambda number: number >= 1)
SEED: Rule = ("a whole number of 64 bits", lambda seed: -(2**63) <= seed < 2**63)


def check_fields(options: Any, rules: dict[str, Rule]) -> None:
    """Check each field of the dataclass `options`: its type first, then its rule. None breaks no rule.

    A number is stored as Python's own int or float, whatever library it came from.
    Raises ValueError, naming the field and its value.
    """
    for field in fields(options):
        value = getattr(options, field.name)
        kinds = (field.type,) if field.type in TYPES else get_args(field.type)  # of int | None: int and None
        if value is None and NoneType in kinds:
            continue
        fitting = [kind for kind in kinds if kind in TYPES and TYPES[kind][1](value)]
        words, holds = rules.get(field.name) or choice(field) or (TYPES[kinds[0]][0], lambda value: True)
        if not fitting or not holds(value):
            shown = " ".join(repr(value).split())  # an array's has several lines
            raise ValueError(f"{field.name} must be {words}, not {shown}")
        if fitting[0] in (int, float):
            object.__setattr__(options, field.name, fitting[0](value))  # the dataclass may be frozen


def choice(field: Field) -> Rule | None:
    """The rule of a knob that has choices."""
    choices = field.metadata.get("choices")
    return (f"one of {', '.join(choices)}", lambda value: value in choices) if choices else None


def is_whole(value: Any) -> bool:
    """
    >>> is_whole(3), is_whole(3.0), is_whole(True), is_whole("3")
    (True, False, False, False)
    """
    return isinstance(value, Integral) and not isinstance(value, bool)


def is_number(value: Any) -> bool:
    """
    >>> is_number(0.5), is_number(2), is_number(True), is_number(math.nan), is_number(10**400)
    (True, True, False, False, False)
    """
    try:
        return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:  # an int that is too large for a float
        return False


TYPES: dict[Any, Rule] = {
    int: ("a whole number", is_whole),
    float: ("a number", is_number),
    bool: ("True or False", lambda value: isinstance(value, bool)),
    str: ("a text", lambda value: isinstance(value, str)),
    Sequence[str]: ("texts", lambda value: isinstance(value, tuple) and all(isinstance(text, str) for text in value)),
    Sequence[int]: ("whole numbers", lambda value: isinstance(value, tuple) and all(map(is_whole, value))),
}
