"""Options of the command line from the fields of a dataclass: max_num_seqs becomes --max-num-seqs."""

from dataclasses import Field
from typing import Any, get_args, get_type_hints

import click

from ..core.flags import knobs


def flags(options: type, **defaults: Any) -> list[click.Parameter]:
    """A flag for each knob of the dataclass `options`; `defaults` take the place of its own."""
    hints = get_type_hints(options)
    return [flag(option, hints[option.name], defaults.get(option.name, option.default)) for option in knobs(options)]


def flag(option: Field, hint: Any, default: Any) -> click.Option:
    """The flag of one field, e.g. of an integer for a hint `int | None`."""
    kind = next(kind for kind in get_args(hint) or (hint,) if kind is not type(None))
    choices, name = option.metadata["choices"], "--" + option.name.replace("_", "-")
    if kind is bool:
        name = f"{name}/--no-{name[2:]}"
    type_ = click.Choice(choices) if choices else kind
    return click.Option([name], type=type_, default=default, show_default=True, help=option.metadata["help"])
