"""SamplingParams of a body, by field."""

from typing import Any

from .fields import PARAMS
from .json_values import read_field, shortened

CHAT_PARAMS = PARAMS | {"logprobs": bool, "max_completion_tokens": int, "top_logprobs": int}


def completion_params(body: dict[str, Any]) -> dict[str, Any]:
    """Raises ValueError, naming the field and the value."""
    given = {name: read_field(name, each, PARAMS[name]) for name, each in body.items() if name in PARAMS}
    return given | form_of(body)


def chat_params(body: dict[str, Any]) -> dict[str, Any]:
    """logprobs is true or false there, and how many are told has a name of its own."""
    given = {name: read_field(name, each, CHAT_PARAMS[name]) for name, each in body.items() if name in CHAT_PARAMS}
    if "max_completion_tokens" in given:
        given["max_tokens"] = given.pop("max_completion_tokens")
    is_told, count = given.pop("logprobs", False), given.pop("top_logprobs", None)
    if count and not is_told:
        raise ValueError("top_logprobs needs logprobs to be true")
    return given | ({"logprobs": count or 0} if is_told else {}) | form_of(body)


def form_of(body: dict[str, Any]) -> dict[str, Any]:
    """response_format as structured_outputs.

    >>> form_of({"response_format": {"type": "json_object"}}), form_of({"response_format": {"type": "text"}})
    ({'structured_outputs': {'json_object': True}}, {})
    """
    asked = read_field("response_format", body.get("response_format", {"type": "text"}), dict)
    kind = asked.get("type")
    if kind == "text":
        return {}
    if "structured_outputs" in body:
        raise ValueError("response_format and structured_outputs both say the form of the output: give one")
    if kind == "json_object":
        return {"structured_outputs": {"json_object": True}}
    if kind != "json_schema":
        raise ValueError(f'response_format.type must be "text", "json_object" or "json_schema", not {shortened(kind)}')
    named = read_field("response_format.json_schema", asked.get("json_schema"), dict)
    schema = read_field("response_format.json_schema.schema", named.get("schema"), dict)
    return {"structured_outputs": {"json": schema}}
