"""What a template may see: texts, numbers, lists and dicts, and nothing that has methods of its own."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np


def plain(value: Any) -> Any:
    """A copy of `value` of JSON's types; anything else becomes a word that names its type.

    >>> plain({"content": ("a", 1, None), "image": object()})
    {'content': ('a', 1, None), 'image': '<object>'}
    """
    if value is None or type(value) in (str, int, float, bool):
        return value
    for kind in (str, int, float):  # members of an Enum, and the like
        if isinstance(value, kind):
            return getattr(kind, f"__{kind.__name__}__")(value)
    if isinstance(value, Mapping):
        return {plain(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return (list if isinstance(value, list) else tuple)(map(plain, value))
    if isinstance(value, np.generic):
        return plain(value.item())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if callable(getattr(value, "model_dump", None)):  # of pydantic
        return plain(value.model_dump())
    return f"<{type(value).__name__}>"
