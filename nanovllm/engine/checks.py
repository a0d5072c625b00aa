"""Options as fields of a dataclass: what a field may be, and which fields are knobs, with a flag on the command line.

check_fields() holds what a caller gave against the types of the fields and a table of rules.
"""

import math
from collections.abc import Callable
from dataclasses import Field, field, fields
from difflib import get_close_matches
from numbers import Integral, Real
from types import NoneType
from typing import Any, get_args

Rule = tuple[str, Callable[[Any], bool]]  # what a value must be, in the words of the error; and whether it is

AT_LEAST_1: Rule = ("a whole number, at least 1", lambda number: number >= 1)
SEED: Rule = ("a whole number of 64 bits", lambda seed: -(2**63) <= seed < 2**63)


def knob(default: Any, help: str, choices: tuple[str, ...] | None = None) -> Any:
    """Return a dataclass field with the help, and the choices, of its flag."""
    return field(default=default, metadata={"help": help, "choices": choices})


def knobs(options: type) -> list[Field]:
    """Return the fields of the dataclass `options` that have a flag."""
    return [option for option in fields(options) if option.metadata]


def check_fields(options: Any, rules: dict[str, Rule]) -> None:
    """Check each field of the dataclass `options`: its type first, then its rule. None breaks no rule.

    Store a number as Python's own int or float, whatever library it came from.
    Raise ValueError, naming the field and its value.
    """
    for option in fields(options):
        value = getattr(options, option.name)
        if (checked := check_field(option, value, rules)) is not value:
            object.__setattr__(options, option.name, checked)  # the dataclass may be frozen


def check_field(option: Field, value: Any, rules: dict[str, Rule]) -> Any:
    """Return `value`, a number as Python's own. Raise ValueError, naming field and value, for a wrong one."""
    kinds = (option.type,) if option.type in TYPES else get_args(option.type) or (option.type,)  # of int | None: both
    if value is None and NoneType in kinds:
        return None
    kinds = tuple(kind for kind in kinds if kind is not NoneType)
    fitting = [kind for kind in kinds if rule_of_type(kind)[1](value)]
    words, holds = rules.get(option.name) or choice(option) or (rule_of_type(kinds[0])[0], lambda value: True)
    if not fitting or not holds(value):
        raise ValueError(f"{option.name} must be {words}, not {shown(value)}")
    return fitting[0](value) if fitting[0] in (int, float) else value


def rule_of_type(kind: Any) -> Rule:
    """Return the rule of a type; for a class that is not in TYPES, "an instance of it"."""
    return TYPES.get(kind) or (f"a {kind.__name__}", lambda value: isinstance(value, kind))


def choice(option: Field) -> Rule | None:
    """Return the rule of a field that has choices."""
    choices = option.metadata.get("choices")
    return (f"one of {', '.join(choices)}", lambda value: value in choices) if choices else None


def shown(value: Any) -> str:
    """Return `value` for an error: on one line, and not a long one."""
    text = " ".join(repr(value).split())  # an array's has several lines
    return text if len(text) <= 200 else text[:197] + "..."


def nearest(name: str, known: list[str]) -> str:
    """Return the end of an error about an unknown name: the known name that is most like it, if one is.

    >>> nearest("tensor_paralel_size", ["seed", "tensor_parallel_size"])
    ": did you mean 'tensor_parallel_size'?"
    """
    near = get_close_matches(name, known, n=1)
    return f": did you mean {near[0]!r}?" if near else ""


def is_whole(value: Any) -> bool:
    """Return whether `value` is a whole number of any library.

    >>> is_whole(3), is_whole(3.0), is_whole(True), is_whole("3")
    (True, False, False, False)
    """
    return isinstance(value, Integral) and not isinstance(value, bool)


def is_number(value: Any) -> bool:
    """Return whether `value` is a finite number of any library.

    >>> is_number(0.5), is_number(2), is_number(True), is_number(math.nan), is_number(10**400)
    (True, True, False, False, False)
    """
    try:
        return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:  # an int that is too large for a float
        return False


def is_list_of(values: Any, is_one: Callable[[Any], bool]) -> bool:
    """Return whether `values` is a list of values for each of which `is_one` holds."""
    return isinstance(values, list) and all(map(is_one, values))


def is_bias(bias: Any) -> bool:
    """Return whether `bias` can be added to a logit; -inf is a way to say never."""
    return is_number(bias) or bias == -math.inf


TYPES: dict[Any, Rule] = {
    int: ("a whole number", is_whole),
    float: ("a number", is_number),
    bool: ("True or False", lambda value: isinstance(value, bool)),
    str: ("a text", lambda value: isinstance(value, str)),
    list[str]: ("a list of texts", lambda values: is_list_of(values, lambda value: isinstance(value, str))),
    list[int]: ("a list of whole numbers", lambda values: is_list_of(values, is_whole)),
    dict[int, float]: (
        "a dict from token ids to numbers",
        lambda value: isinstance(value, dict) and all(map(is_whole, value)) and all(map(is_bias, value.values())),
    ),
}
