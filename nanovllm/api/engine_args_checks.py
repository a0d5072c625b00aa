"""What EngineArgs takes for its own options. Those of EngineConfig are checked there."""

from collections.abc import Iterable
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..backends import options
from ..engine.checks import TYPES, Rule, is_whole

if TYPE_CHECKING:
    from .engine_args import EngineArgs

PLACE: Rule = ("a folder or a name of the hub", lambda value: isinstance(value, str | Path))
LOAD_FORMATS = ("auto", "safetensors", "dummy")
RULES: dict[str, Rule] = {
    "tokenizer": PLACE,
    "skip_tokenizer_init": TYPES[bool],
    "revision": TYPES[str],
    "tokenizer_revision": TYPES[str],
    "download_dir": ("a folder", PLACE[1]),
    "hf_token": ("a text, True or False", lambda value: isinstance(value, str | bool)),
    "load_format": (f"one of {', '.join(LOAD_FORMATS)}", lambda value: value in LOAD_FORMATS),
    "served_model_name": ("a text, or a list of texts, at least one", lambda value: is_name(value)),
    "num_gpu_blocks_override": ("a whole number, at least 1", lambda value: is_whole(value) and value >= 1),
    "generation_config": ("auto, vllm or a folder", lambda value: isinstance(value, str | Path)),
    "attention_backend": options.RULE,
    "enforce_eager": TYPES[bool],
    "override_generation_config": ("a dictionary", lambda value: isinstance(value, dict)),
}
# elsewhere None is the engine's own default
NEVER_NONE = ("skip_tokenizer_init", "generation_config", "enforce_eager", "load_format")


class UnknownOption(TypeError, ValueError):
    """A name that is no option: Python's error for it, and a ValueError as all that a caller gets wrong here."""


def check_options(args: "EngineArgs") -> None:
    """Raises ValueError for the first option that has a wrong value, naming it."""
    for name, (words, holds) in RULES.items():
        value = getattr(args, name)
        if (value is not None or name in NEVER_NONE) and not holds(value):
            raise ValueError(f"{name} must be {words}, not {value!r}")
    options.backend_of(args.attention_backend, args.enforce_eager)


def check_names(options: Iterable[str], known: list[str]) -> None:
    """Raises UnknownOption for the first of `options` that is not among `known`, with the nearest of these."""
    for name in options:
        if name not in known:
            raise UnknownOption(f"there is no option {name!r}{nearest(name, known)}")


def is_name(value: Any) -> bool:
    """
    >>> is_name("a"), is_name(["a", "b"]), is_name([])
    (True, True, False)
    """
    names = value if isinstance(value, list) else [value]
    return bool(names) and all(isinstance(name, str) for name in names)


def nearest(name: str, known: list[str]) -> str:
    """
    >>> nearest("tensor_paralel_size", ["seed", "tensor_parallel_size"])
    ": did you mean 'tensor_parallel_size'?"
    """
    found = get_close_matches(name, known, n=1)
    return f": did you mean {found[0]!r}?" if found else ""
