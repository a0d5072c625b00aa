"""How EngineArgs reads a value that may be said in several ways, as vLLM does; also on a command line."""

import re
from argparse import BooleanOptionalAction
from typing import Any, get_args

import torch

DTYPES = {"half": "float16", "float": "float32"}  # vLLM's other names
MULTIPLIERS = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def dtype_name(dtype: Any) -> Any:
    """
    >>> dtype_name("half"), dtype_name(torch.float16), dtype_name("auto")
    ('float16', 'float16', 'auto')
    """
    if isinstance(dtype, torch.dtype):
        return str(dtype).removeprefix("torch.")
    return DTYPES.get(dtype, dtype) if isinstance(dtype, str) else dtype


def whole_number(value: Any) -> Any:
    """The number that a text such as "1k" stands for; what is no text stays as it is.

    >>> whole_number("1k"), whole_number("1K"), whole_number("25.6k"), whole_number("4096"), whole_number(None)
    (1000, 1024, 25600, 4096, None)
    """
    if not isinstance(value, str):
        return value
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([kKmMgGtT]?)", value.strip())
    if not found or ("." in found[1] and not found[2].islower()):  # a fraction of 1,024 would be no whole number
        raise ValueError(f"{value!r} is no whole number, such as 4096, 4k (4,000) or 4K (4,096)")
    return round(float(found[1]) * MULTIPLIERS[found[2]]) if found[2] else int(found[1])


def length(text: str) -> Any:
    return -1 if text == "auto" else whole_number(text)


def flag_kind(hint: Any, default: Any) -> dict[str, Any]:
    """What argparse must know of an option with this type and default."""
    kinds = [kind for kind in get_args(hint) or (hint,) if kind is not type(None)]
    if kinds[0] is bool or isinstance(default, bool):
        return {"action": BooleanOptionalAction}
    if kinds[0] is int or type(default) is int:
        return {"type": length if str in kinds else whole_number}
    return {"type": float if kinds[0] is float or isinstance(default, float) else str}
