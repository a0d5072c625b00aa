"""The official client's types: it does not look itself whether an answer has what they require."""

from typing import Any

from openai import BaseModel


def unset(value: Any, path: str = "") -> list[str]:
    """Required fields that the answer has not."""
    if isinstance(value, list):
        return [each for one in value for each in unset(one, path)]
    if not isinstance(value, BaseModel):
        return []
    fields = type(value).model_fields.items()
    missing = [f"{path}.{name}" for name, each in fields if each.is_required() and name not in value.model_fields_set]
    return missing + [each for name, _ in fields for each in unset(getattr(value, name, None), f"{path}.{name}")]
