"""Knob: what the command line must know of one field of EngineConfig or SamplingParams."""

from typing import Any, NamedTuple


class Knob(NamedTuple):
    name: str
    kind: type  # of its value: int for a field `int | None`
    default: Any
    help: str
    choices: tuple[str, ...] | None = None
