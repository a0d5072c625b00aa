"""Command-line flags from the fields of a dataclass: max_num_seqs becomes --max-num-seqs."""

from argparse import ArgumentParser, BooleanOptionalAction, Namespace
from dataclasses import Field, field, fields
from typing import Any, get_args, get_type_hints


def knob(default: Any, help: str, choices: tuple[str, ...] | None = None) -> Any:
    """Make a dataclass field that has a flag; `help` and `choices` are the flag's."""
    return field(default=default, metadata={"help": help, "choices": choices})


def knobs(options: type) -> list[Field]:
    """Return the fields of the dataclass `options` that have a flag."""
    return [option for option in fields(options) if option.metadata]


def add_flags(parser: ArgumentParser, options: type) -> None:
    """Add a flag for each knob of the dataclass `options`."""
    hints = get_type_hints(options)
    for option in knobs(options):
        parser.add_argument("--" + option.name.replace("_", "-"), **flag(option, hints[option.name]))


def flag(option: Field, hint: Any) -> dict[str, Any]:
    """Return what argparse needs to know of one field, for example type int for a hint `int | None`."""
    kind = next(kind for kind in get_args(hint) or (hint,) if kind is not type(None))
    help = option.metadata["help"]
    if kind is bool:  # --name and --no-name
        return {"action": BooleanOptionalAction, "default": option.default, "help": help}
    if option.default is not None:
        help += " (default: %(default)s)"
    return {"type": kind, "default": option.default, "choices": option.metadata["choices"], "help": help}


def flag_values(options: type, args: Namespace) -> dict[str, Any]:
    """Return the parsed flags of the dataclass `options`, by field."""
    return {option.name: getattr(args, option.name) for option in knobs(options)}
