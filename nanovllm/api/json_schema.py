"""A JSON schema of a request: read, checked, and closed to properties that it does not name."""

import json
from collections.abc import Iterator
from typing import Any

MAX_NESTING = 64  # of objects and lists; each level makes a grammar larger

# Where a schema has schemas: in a dict by name, and by themselves or in a list.
BY_NAME = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies")
WITHIN = (
    *("additionalProperties", "unevaluatedProperties", "propertyNames", "contains", "additionalItems"),
    *("unevaluatedItems", "not", "if", "then", "else", "contentSchema", "items", "prefixItems"),
    *("allOf", "anyOf", "oneOf"),
)


def read_schema(given: str | dict[str, Any], is_closed: bool = False) -> Any:
    """The schema as a value of its own. `is_closed`: objects have no properties but those that it names.

    Raises ValueError if it is no JSON, or nested too deeply.

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
    """
    >>> nesting({"a": [1, {}]}), nesting(1)
    (3, 0)
    """
    depth, level = 0, [value]
    while level := [each for each in level if isinstance(each, dict | list)]:
        depth += 1
        level = [inner for each in level for inner in (each.values() if isinstance(each, dict) else each)]
    return depth


def parts_of(schema: Any) -> Iterator[dict[str, Any]]:
    """The schema, and all schemas inside it."""
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
