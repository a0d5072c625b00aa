"""SamplingParams of a body, by field."""

from typing import Any

from ...engine.sampling_params import clamped
from .fields import PARAMS, check_names
from .json_values import read_field, shortened

KINDS = ("text", "json_object", "json_schema")
FORM, SCHEMA = ("type", "json_schema"), ("name", "description", "schema", "strict")
CHAT_PARAMS = PARAMS | {"logprobs": bool, "max_completion_tokens": int, "top_logprobs": int}


def completion_params(body: dict[str, Any]) -> dict[str, Any]:
    """Raises ValueError, naming the field and the value."""
    given = {name: read_field(name, each, PARAMS[name]) for name, each in body.items() if name in PARAMS}
    return told_of(given, given.pop("logprobs", None)) | form_of(body)


def chat_params(body: dict[str, Any]) -> dict[str, Any]:
    """logprobs is true or false there, and how many are told has a name of its own."""
    given = {name: read_field(name, each, CHAT_PARAMS[name]) for name, each in body.items() if name in CHAT_PARAMS}
    if "max_completion_tokens" in given:
        given["max_tokens"] = given.pop("max_completion_tokens")
        if given["max_tokens"] < 1:
            raise ValueError(f"max_completion_tokens must be at least 1, not {given['max_tokens']}")
    is_told, count = given.pop("logprobs", False), given.pop("top_logprobs", None)
    if count and not is_told:
        raise ValueError("top_logprobs needs logprobs to be true")
    return told_of(given, count or 0 if is_told else None) | form_of(body)


def told_of(given: dict[str, Any], count: int | None) -> dict[str, Any]:
    """With logprobs, how many are told of each token, and a bias within OpenAI's bounds.

    >>> told_of({"logprob_token_ids": [5]}, 1), told_of({"logit_bias": {7: -1000}}, 1)
    ({'logprob_token_ids': [5]}, {'logit_bias': {7: -100.0}, 'logprobs': 1})
    """
    if "logit_bias" in given:
        given["logit_bias"] = {token: clamped(bias) for token, bias in given["logit_bias"].items()}
    if given.get("logprob_token_ids"):
        if count is None:
            raise ValueError("logprob_token_ids needs logprobs, too")
        return given
    return given if count is None else given | {"logprobs": count}


def form_of(body: dict[str, Any]) -> dict[str, Any]:
    """response_format as structured_outputs.

    >>> form_of({"response_format": {"type": "json_object"}}), form_of({"response_format": {"type": "text"}})
    ({'structured_outputs': {'json_object': True}}, {})
    """
    asked = read_field("response_format", body.get("response_format", {"type": "text"}), dict)
    kind = asked.get("type")
    if kind not in KINDS:
        raise ValueError(f'response_format.type must be "text", "json_object" or "json_schema", not {shortened(kind)}')
    check_names(asked, FORM, "response_format may have")
    if kind == "text":
        return {}
    if "structured_outputs" in body:
        raise ValueError("response_format and structured_outputs both say the form of the output: give one")
    if kind == "json_object":
        return {"structured_outputs": {"json_object": True}}
    named = read_field("response_format.json_schema", asked.get("json_schema"), dict)
    check_names(named, SCHEMA, "response_format.json_schema may have")
    schema = read_field("response_format.json_schema.schema", named.get("schema"), dict)
    return {"structured_outputs": {"json": schema}}
