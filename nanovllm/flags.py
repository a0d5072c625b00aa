"""Options of the command line from the fields of a dataclass: max_num_seqs becomes --max-num-seqs."""

from dataclasses import Field, field, fields
from itertools import groupby
from typing import Any, get_args, get_type_hints

import click


def knob(default: Any, help: str, choices: tuple[str, ...] | None = None) -> Any:
    """A dataclass field that has a flag, and carries what the flag says."""
    return field(default=default, metadata={"help": help, "choices": choices})


def knobs(options: type) -> list[Field]:
    """The fields of a dataclass that have a flag."""
    return [option for option in fields(options) if option.metadata]


class Flag(click.Option):
    """An option that stands under a title of its own in the help."""

    def __init__(self, name: str, title: str, **attributes: Any) -> None:
        super().__init__([name], show_default=True, **attributes)
        self.title = title


class Command(click.Command):
    """A command whose help has its flags by title."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        options = [each for each in self.get_params(ctx) if isinstance(each, click.Option)]
        options.sort(key=lambda option: isinstance(option, Flag))
        for title, group in groupby(options, key=lambda option: getattr(option, "title", "Options")):
            with formatter.section(title):
                formatter.write_dl([record for each in group if (record := each.get_help_record(ctx))])


def flags(options: type, title: str, **defaults: Any) -> list[click.Parameter]:
    """A flag for each knob of the dataclass `options`; `defaults` take the place of its own."""
    hints = get_type_hints(options)
    return [
        flag(option, hints[option.name], title, defaults.get(option.name, option.default)) for option in knobs(options)
    ]


def flag(option: Field, hint: Any, title: str, default: Any) -> Flag:
    """The flag of one field, e.g. of type int for a hint `int | None`."""
    kind = next(kind for kind in get_args(hint) or (hint,) if kind is not type(None))
    choices, name = option.metadata["choices"], "--" + option.name.replace("_", "-")
    if kind is bool:
        name = f"{name}/--no-{name[2:]}"
    type_ = click.Choice(choices) if choices else kind
    return Flag(name, title, type=type_, default=default, help=option.metadata["help"])
