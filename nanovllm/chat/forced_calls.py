"""Forced calls: with tool_choice "required" or a function's name, the output is JSON.

This is independent of the format in which the model writes other calls. If tool_choice names a function, the JSON is
only that function's arguments. Otherwise, it is a list of calls, such as [{"name": "add", "arguments": {"a": 1}}].
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

JsonDict = dict[str, Any]


@dataclass(frozen=True)
class ForcedCall:
    """A JSON schema that the output must follow, after the thought if there is one."""

    schema: JsonDict
    name: str | None = None  # of the function, if the output is only its arguments


def forced_call(
    functions: Sequence[Mapping[str, Any]], name: str | None = None, parallel_tool_calls: bool = True
) -> ForcedCall:
    """Return the schema that makes the model call one of `functions`, or the one named `name`.

    A function looks like {"name": "add", "parameters": {...}}. Raise ValueError if no function has that
    name, or if there are no functions.
    """
    if name is not None:
        by_name = {function["name"]: function for function in functions}
        if name not in by_name:
            raise ValueError(f"tool_choice must name one of the tools ({', '.join(by_name)}), got {name!r}")
        return ForcedCall(parameters_of(by_name[name]), name)
    if not functions:
        raise ValueError("tool_choice 'required' needs at least 1 tool, got 0")
    schema: JsonDict = {
        "type": "array",
        "minItems": 1,
        "items": {"anyOf": [call_schema(function["name"], f"#/$defs/{i}") for i, function in enumerate(functions)]},
        "$defs": {f"{i}": relocated(parameters_of(function), f"#/$defs/{i}") for i, function in enumerate(functions)},
    }
    return ForcedCall(schema if parallel_tool_calls else {**schema, "maxItems": 1})


def call_schema(name: str, parameters_ref: str) -> JsonDict:
    """Return the schema of a call to a function. `parameters_ref` refers to the schema of the function's arguments."""
    properties = {"name": {"const": name}, "arguments": {"$ref": parameters_ref}}
    return {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}


def parameters_of(function: Mapping[str, Any]) -> JsonDict:
    """Return the schema of a function's arguments. A function without a schema takes no arguments."""
    return function.get("parameters") or {"type": "object", "properties": {}, "additionalProperties": False}


def relocated(schema: Any, path: str) -> Any:
    """Return a copy of a schema to embed at `path` in another schema, with its internal references adjusted.

    >>> relocated({"items": {"$ref": "#/$defs/Point"}}, "#/$defs/0")
    {'items': {'$ref': '#/$defs/0/$defs/Point'}}
    """
    if isinstance(schema, Mapping):
        return {
            key: path + value[1:]
            if key == "$ref" and isinstance(value, str) and value.startswith("#")
            else relocated(value, path)
            for key, value in schema.items()
        }
    return [relocated(value, path) for value in schema] if isinstance(schema, list) else schema
