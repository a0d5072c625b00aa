"""Options of the command line from the fields of a dataclass: max_num_seqs becomes --max-num-seqs."""

from dataclasses import Field, field, fields
from typing import Any, get_args, get_type_hints

import click


def knob(default: Any, help: str, choices: tuple[str, ...] | None = None) -> Any:
    """A dataclass field that has a flag, and carries what the flag says."""
    return field(default=default, metadata={"help": help, "choices": choices})


def knobs(options: type) -> list[Field]:
    """The fields of a dataclass that have a flag."""
    return [option for option in fields(options) if option.metadata]


def flags(options: type, **defaults: Any) -> list[click.Parameter]:
    """A flag for each knob of the dataclass `options`; `defaults` take the place of its own."""
    hints = get_type_hints(options)
    return [flag(option, hints[option.name], defaults.get(option.name, option.default)) for option in knobs(options)]


def flag(option: Field, hint: Any, default: Any) -> click.Option:
    """The flag of one field, e.g. of type int for a hint `int | None`."""
    kind = next(kind for kind in get_args(hint) or (hint,) if kind is not type(None))
    choices, name = option.metadata["choices"], "--" + option.name.replace("_", "-")
    if kind is bool:
        name = f"{name}/--no-{name[2:]}"
    type_ = click.Choice(choices) if choices else kind
    return click.Option([name], type=type_, default=default, show_default=True, help=option.metadata["help"])
