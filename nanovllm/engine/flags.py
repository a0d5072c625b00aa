"""Knobs: fields of a dataclass that the command line has an option for. cli/knobs.py lists them all."""

from dataclasses import Field, field, fields
from typing import Any


def knob(default: Any, help: str, choices: tuple[str, ...] | None = None) -> Any:
    """Return a dataclass field with the help, and the choices, of its option."""
    return field(default=default, metadata={"help": help, "choices": choices})


def knobs(options: type) -> list[Field]:
    """Return the fields of the dataclass `options` that have an option."""
    return [option for option in fields(options) if option.metadata]
