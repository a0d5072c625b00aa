"""Checks for options that are fields of a dataclass.

check_fields() checks each value against the field's type and a table of rules. It raises ValueError with the name and
the value, such as "max_tokens must be at least 1, got 0".
"""

import math
from collections.abc import Callable
from dataclasses import Field, field, fields
from difflib import get_close_matches
from functools import cache
from numbers import Integral, Real
from types import NoneType
from typing import Any, TypeVar, get_args

Default = TypeVar("Default")
Rule = tuple[str, Callable[[Any], bool]]  # the words that follow "must be", and the check itself

AT_LEAST_0: Rule = ("at least 0", lambda number: number >= 0)
AT_LEAST_1: Rule = ("at least 1", lambda number: number >= 1)
SEED: Rule = ("a 64-bit integer", lambda seed: -(2**63) <= seed < 2**63)


def cli_option(default: Default, help: str, choices: tuple[str, ...] = (), flags: tuple[str, ...] = ()) -> Default:
    """Return a dataclass field that is also a command-line option. `flags` are its short forms."""
    return field(default=default, metadata={"help": help, "choices": choices, "flags": flags})


def check_fields(options: Any, rules: dict[str, Rule]) -> None:
    """Check the type of each field of the dataclass `options`, then its rule. Rules do not apply to None.

    Replace numbers of other libraries, such as numpy's, with Python numbers. Raise ValueError for an invalid field.
    """
    for option in fields(options):
        # The dataclass may be frozen.
        object.__setattr__(options, option.name, check_field(option, getattr(options, option.name), rules))


def check_field(option: Field[Any], value: Any, rules: dict[str, Rule]) -> Any:
    """Return `value`, or a Python number for another library's number. Raise ValueError for a wrong type or value."""
    types = types_of(option)
    if value is None and NoneType in types:
        return None
    matching = [kind for kind in types if kind is not NoneType and rule_for_type(kind)[1](value)]
    requirement, is_valid = rules.get(option.name) or choices_rule(option)
    if not matching:
        requirement = " or ".join(rule_for_type(kind)[0] for kind in types if kind is not NoneType)
    if not matching or not is_valid(value):
        raise ValueError(f"{option.name} must be {requirement}, got {short_repr(value)}")
    return matching[0](value) if matching[0] in (int, float) else value


@cache
def types_of(option: Field[Any]) -> tuple[Any, ...]:
    """Return the types that a field may have: several if it is a union."""
    return (option.type,) if option.type in TYPE_RULES else get_args(option.type) or (option.type,)


def rule_for_type(kind: Any) -> Rule:
    """Return the rule for a type in TYPE_RULES, or an isinstance check for any other class."""
    return TYPE_RULES.get(kind) or (f"a {kind.__name__}", lambda value: isinstance(value, kind))


@cache
def choices_rule(option: Field[Any]) -> Rule:
    """Return the rule for the field's choices. A field without choices accepts every value of its type."""
    choices = option.metadata.get("choices")
    return (f"one of {', '.join(choices)}" if choices else "", lambda value: not choices or value in choices)


def check_unsupported(**arguments: Any) -> None:
    """Raise ValueError if an argument that only vLLM supports is set. None, False, 0 and empty values count as unset.

    So does a list in which all items are unset.

    >>> check_unsupported(lora_request=None, priority=[0, 0], mm_processor_kwargs={})
    """
    for name, value in arguments.items():
        values = value if isinstance(value, list | tuple) else [value]
        if value is not None and any(item not in (None, 0, "", {}, [], ()) for item in values):
            raise ValueError(f"{name} is unsupported, got {short_repr(value)}")


def short_repr(value: Any) -> str:
    """Return repr(value) on one line of at most 200 characters, for an error message."""
    text = " ".join(repr(value).split())  # an array's repr has several lines
    return text if len(text) <= 200 else text[:197] + "..."


def did_you_mean(name: str, known: list[str]) -> str:
    """Return a hint for an error about an unknown name: the most similar known name, or "" if none is similar.

    >>> did_you_mean("tensor_paralel_size", ["seed", "tensor_parallel_size"])
    ": did you mean 'tensor_parallel_size'?"
    """
    similar_names = get_close_matches(name, known, n=1)
    return f": did you mean {similar_names[0]!r}?" if similar_names else ""


def is_integer(value: Any) -> bool:
    """Return True if `value` is an integer of any library.

    >>> is_integer(3), is_integer(3.0), is_integer(True), is_integer("3")
    (True, False, False, False)
    """
    return type(value) is int or (isinstance(value, Integral) and not isinstance(value, bool))  # the fast test first


def is_number(value: Any) -> bool:
    """Return True if `value` is a finite number of any library.

    >>> is_number(0.5), is_number(2), is_number(True), is_number(math.nan), is_number(10**400)
    (True, True, False, False, False)
    """
    try:
        return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:  # an int that is too large for a float
        return False


def is_list_of(values: Any, is_item: Callable[[Any], bool]) -> bool:
    """Return True if `values` is a list and `is_item` holds for each item."""
    return isinstance(values, list) and all(map(is_item, values))


def is_bias(bias: Any) -> bool:
    """Return True if `bias` can be added to a logit. -inf bans the token."""
    return is_number(bias) or bias == -math.inf


TYPE_RULES: dict[Any, Rule] = {
    int: ("an integer", is_integer),
    float: ("a finite number", is_number),
    bool: ("True or False", lambda value: isinstance(value, bool)),
    str: ("a string", lambda value: isinstance(value, str)),
    list[str]: ("a list of strings", lambda values: is_list_of(values, lambda value: isinstance(value, str))),
    list[int]: ("a list of integers", lambda values: is_list_of(values, is_integer)),
    dict[str, Any]: ("a dictionary", lambda value: isinstance(value, dict)),
    dict[int, float]: (
        "a dict from token ids to numbers",
        lambda value: isinstance(value, dict) and all(map(is_integer, value)) and all(map(is_bias, value.values())),
    ),
}
