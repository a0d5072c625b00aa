"""StructuredOutputsParams: the form that an output must have. grammars.py holds the output to it."""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from typing import Any

KINDS = ("json", "regex", "choice", "grammar", "json_object")
JSON_OPTIONS = ("disable_any_whitespace", "disable_additional_properties", "whitespace_pattern")

MAX_NESTING = 64  # of objects and lists; each level makes a grammar larger

# Where a schema has schemas: in a dict by name, and by themselves or in a list.
BY_NAME = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies")
WITHIN = (
    *("additionalProperties", "unevaluatedProperties", "propertyNames", "contains", "additionalItems"),
    *("unevaluatedItems", "not", "if", "then", "else", "contentSchema", "items", "prefixItems"),
    *("allOf", "anyOf", "oneOf"),
)


@dataclass
class StructuredOutputsParams:
    """The fields of vLLM 0.32. One of the first five is given."""

    json: str | dict[str, Any] | None = None  # a JSON schema: the output is JSON that it allows
    regex: str | None = None  # all of the output matches it
    choice: list[str] | None = None  # the output is one of these
    grammar: str | None = None  # in the notation of Lark or in GBNF
    json_object: bool | None = None  # True: any JSON object
    disable_any_whitespace: bool = False  # there is no whitespace between the parts of JSON
    disable_additional_properties: bool = False  # objects have no properties but those that the schema names
    whitespace_pattern: str | None = None  # a regular expression of what there may be between the parts of JSON
    structural_tag: str | None = None  # refused

    def __post_init__(self) -> None:
        """Raise ValueError, naming the field and its value."""
        if self.structural_tag is not None:
            raise ValueError("structural_tag is not served here: describe the tags and their contents as a grammar")
        given = [kind for kind in KINDS if getattr(self, kind) is not None]
        if len(given) != 1:
            raise ValueError(f"give one of {', '.join(KINDS)}, not {' and '.join(given) or 'none'}")
        for name, (words, holds) in CHECKS.items():
            value = getattr(self, name)
            if not (holds(value) or (value is None and name != given[0])):
                raise ValueError(f"{name} must be {words}, not {brief(value)}")
        options = [name for name in JSON_OPTIONS if getattr(self, name)]
        if options and given[0] not in ("json", "json_object"):
            raise ValueError(f"{options[0]} is for json and json_object, and this is a {given[0]}")
        if self.json is not None:
            read_schema(self.json)

    @classmethod
    def of(cls, fields_by_name: dict[str, Any]) -> "StructuredOutputsParams":
        """Make them of a dictionary, as a line of a file has them."""
        names = [field.name for field in fields(cls)]
        for name in fields_by_name:
            if name not in names:
                raise ValueError(f"structured_outputs has no {name!r}; it has {', '.join(names)}")
        return cls(**fields_by_name)

    @property
    def kind(self) -> str:
        return next(kind for kind in KINDS if getattr(self, kind) is not None)


def is_text(value: Any) -> bool:
    return isinstance(value, str)


def is_some_text(value: Any) -> bool:
    return is_text(value) and not value.isspace() and value != ""


def is_texts(value: Any) -> bool:
    return isinstance(value, list) and len(value) > 0 and all(map(is_text, value))


def is_flag(value: Any) -> bool:
    return isinstance(value, bool)


CHECKS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "json": ("a JSON schema, as a dict or a text", lambda value: isinstance(value, dict) or is_some_text(value)),
    "regex": ("a text without NUL characters", lambda value: is_text(value) and "\0" not in value),
    "choice": ("a list of texts, at least one", is_texts),
    "grammar": ("a text that is not empty", is_some_text),
    "json_object": ("True", lambda value: value is True),
    "disable_any_whitespace": ("True or False", is_flag),
    "disable_additional_properties": ("True or False", is_flag),
    "whitespace_pattern": ("a text", is_text),
}


def read_schema(given: str | dict[str, Any], is_closed: bool = False) -> Any:
    """Return a copy of a schema. With `is_closed` its objects have no properties but the named ones.

    Raise ValueError if it is no JSON, or nested too deeply.

    >>> read_schema('{"properties": {"a": {"type": "string"}}}', is_closed=True)
    {'properties': {'a': {'type': 'string'}}, 'additionalProperties': False}
    """
    try:
        schema = json.loads(given if isinstance(given, str) else json.dumps(given))
    except (ValueError, TypeError) as error:
        raise ValueError(f"json must be a JSON schema: {error}") from None
    except RecursionError:
        schema = None
    if schema is None or nesting(schema) > MAX_NESTING:
        raise ValueError(f"json must be nested at most {MAX_NESTING} levels deep")
    if not isinstance(schema, dict | bool):
        raise ValueError(f"json must be a JSON schema, an object, not {brief(given)}")
    if is_closed:
        for part in parts_of(schema):
            if isinstance(part.get("properties"), dict) or isinstance(part.get("patternProperties"), dict):
                part.setdefault("additionalProperties", False)
    return schema


def nesting(value: Any) -> int:
    """Return how deep lists and objects are nested.

    >>> nesting({"a": [1, {}]}), nesting(1)
    (3, 0)
    """
    depth, level = 0, [value]
    while level := [each for each in level if isinstance(each, dict | list)]:
        depth += 1
        level = [inner for each in level for inner in (each.values() if isinstance(each, dict) else each)]
    return depth


def parts_of(schema: Any) -> Iterator[dict[str, Any]]:
    """Yield the schema, and all schemas inside it."""
    if isinstance(schema, list):
        for each in schema:
            yield from parts_of(each)
    if not isinstance(schema, dict):
        return
    yield schema
    for keyword in BY_NAME:
        named = schema.get(keyword)
        yield from parts_of(list(named.values()) if isinstance(named, dict) else None)
    for keyword in WITHIN:
        yield from parts_of(schema.get(keyword))


def brief(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 200 else text[:197] + "..."
