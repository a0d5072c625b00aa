"""A Python function as the JSON schema of a tool: types from its hints, words from its docstring."""

import inspect
import json
import re
import types
from collections.abc import Callable
from enum import Enum
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

SCALARS = {int: "integer", float: "number", str: "string", bool: "boolean", type(None): "null"}
TYPES = SCALARS | {list: "array", tuple: "array", dict: "object"}
ENTRY = re.compile(r"([ \t]*)(\w+):(.*)", re.DOTALL)
CHOICES = re.compile(r"\(choices:\s*(.*?)\)\s*$", re.IGNORECASE)


def function_schema(function: Callable) -> dict[str, Any]:
    """{"type": "function", "function": {"name", "description", "parameters"}}, as transformers makes it.

    Each parameter needs a type hint, and a line under "Args:" in the docstring. Raise ValueError for one that has
    not, or whose hint says nothing in JSON.
    """
    name = getattr(function, "__name__", "operation")
    doc = (inspect.getdoc(function) or "").strip()
    if not doc:
        raise ValueError(f"tool {name} has no docstring")
    description, arguments, returned = read_docstring(doc)
    properties, required, result = read_hints(function, name)
    for argument, schema in properties.items():
        if argument not in arguments:
            raise ValueError(f"tool {name}: its docstring does not describe {argument}")
        schema |= described(arguments[argument], f"tool {name}: {argument}")
    parameters = {"type": "object", "properties": properties} | ({"required": required} if required else {})
    schema = {"name": name, "description": description, "parameters": parameters}
    if result is not None:
        schema["return"] = result | ({} if returned is None else {"description": returned})
    return {"type": "function", "function": schema}


def read_docstring(doc: str) -> tuple[str, dict[str, str], str | None]:
    """Return the description of a function, its arguments and its result, from a docstring in Google's style."""
    description = re.split(r"\s*(?:Args:|Returns:|Raises:)", doc, maxsplit=1)[0].strip()
    block = re.search(r"\n\s*Args:\n(.*?)\s*(?:Returns:|Raises:|\Z)", doc, re.DOTALL)
    returned = re.search(r"\n\s*Returns:\n\s*(.*?)\s*(?:Raises:|\Z)", doc, re.DOTALL)
    entries: list[tuple[str, str, list[str]]] = []  # indentation, name, lines
    for line in filter(str.strip, block[1].split("\n") if block else []):
        match = ENTRY.match(line)
        is_deeper = entries and re.match(re.escape(entries[-1][0]) + "[ \t]", line)
        if match and not is_deeper:
            entries.append((match[1], match[2], [match[3]]))
        elif entries:
            entries[-1][2].append(line)
    arguments = {name: " ".join(filter(None, map(str.strip, lines))) for _, name, lines in entries}
    return description, arguments, returned[1].strip() if returned else None


def described(text: str, where: str) -> dict[str, Any]:
    """Return a parameter's description; "(choices: [...])" at its end lists the values that it may have."""
    match = CHOICES.search(text)
    if match is None:
        return {"description": text}
    try:
        choices = json.loads(match[1])
    except ValueError:
        raise ValueError(f"{where}: choices must be a list in JSON, not {match[1]}") from None
    choices = [choice.strip() if isinstance(choice, str) else choice for choice in choices]
    return {"enum": choices, "description": text[: match.start()].strip()}


def read_hints(function: Callable, name: str) -> tuple[dict[str, Any], list[str], dict[str, Any] | None]:
    """Return the parameters' schemas, the names of the required ones, and the result's schema if it has a hint."""
    parameters = dict(inspect.signature(function).parameters)
    first = next(iter(parameters), None)
    if first in ("self", "cls") and parameters[first].annotation is inspect.Parameter.empty:
        del parameters[first]
    for parameter in parameters.values():
        if parameter.annotation is inspect.Parameter.empty:
            raise ValueError(f"tool {name}: {parameter.name} has no type hint")
    hints = get_type_hints(function)
    try:
        properties = {each: hint_schema(hints[each]) for each in hints if each in parameters}
    except ValueError as error:
        raise ValueError(f"tool {name}: {error}") from None
    try:
        result = hint_schema(hints["return"]) if "return" in hints else None
    except ValueError:  # no model generates the result: it may be anything
        result = None
    required = [each for each in parameters if parameters[each].default is inspect.Parameter.empty]
    return properties, required, result


def hint_schema(hint: Any) -> dict[str, Any]:
    """Return the JSON schema of a type hint.

    >>> hint_schema(list[int] | None)
    {'type': 'array', 'items': {'type': 'integer'}, 'nullable': True}
    """
    origin, args = get_origin(hint), get_args(hint)
    if hint is Any:
        return {}
    if origin is None and isinstance(hint, type) and hint in TYPES:
        return {"type": TYPES[hint]}
    if isinstance(hint, type) and issubclass(hint, Enum):
        return values_schema([member.value for member in hint], hint)
    if origin is Literal:
        return values_schema(list(args), hint)
    if origin in (Union, types.UnionType):
        return union_schema(args)
    if origin is list:
        return {"type": "array", "items": hint_schema(args[0])}
    if origin is tuple and len(args) > 1 and ... not in args:
        return {"type": "array", "prefixItems": [hint_schema(arg) for arg in args]}
    if origin is dict:
        return {"type": "object", "additionalProperties": hint_schema(args[1])}
    raise ValueError(f"the type hint {hint} says nothing in JSON: give the schema itself")


def values_schema(values: list[Any], hint: Any) -> dict[str, Any]:
    if not values or any(type(value) not in SCALARS for value in values):
        raise ValueError(f"the values of the type hint {hint} are not all texts, numbers, booleans or None")
    kinds = list(dict.fromkeys(SCALARS[type(value)] for value in values))
    return {"type": kinds[0] if len(kinds) == 1 else kinds, "enum": values}


def union_schema(args: tuple[Any, ...]) -> dict[str, Any]:
    schemas = [hint_schema(arg) for arg in args if arg is not type(None)]
    if len(schemas) == 1:
        schema = schemas[0]
    elif all(schema.keys() == {"type"} and isinstance(schema["type"], str) for schema in schemas):
        kinds = sorted({schema["type"] for schema in schemas})
        schema = {"type": kinds[0] if len(kinds) == 1 else kinds}
    else:
        schema = {"anyOf": schemas}
    return schema | {"nullable": True} if type(None) in args else schema
