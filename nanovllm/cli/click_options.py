"""Command-line options, made from the fields of dataclasses.

A field with help text in its metadata is an option: `max_num_seqs: int = field(default=32, metadata={"help": ...})`
becomes `--max-num-seqs INTEGER`. Nothing here imports torch, so `--help` appears immediately.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import Field, fields
from typing import TYPE_CHECKING, Any, get_args

import click

from ..checkpoints.sizes import parse_size
from ..options.config import DEFAULTS_ON_CUDA, EngineConfig
from ..options.engine_args import EngineArgs, is_size, json_object
from ..options.vllm_options import ServeCompatibilityOptions
from ..requests.sampling_params import SamplingParams

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


def option(field: Field[Any], **changes: Any) -> click.Option:
    """Return the option for a field. `changes` are arguments of click.Option, such as `default`."""
    name = "--" + field.name.replace("_", "-")
    types = get_args(field.type) or (field.type,)
    kind: Any = next((kind for kind in (bool, int, float) if kind in types and str not in types), str)
    if kind is bool:
        name = f"{name}/--no-{name[2:]}"
    if dict[str, Any] in types:
        kind = json_option
    kind = SIZE if kind is int and is_size(field.name) else kind
    kind = GIB if kind is float and field.name.endswith("_size") else kind
    choices = field.metadata.get("choices")
    settings: dict[str, Any] = {"type": click.Choice(choices) if choices else kind, "default": field.default}
    settings |= {"help": field.metadata.get("help")} | changes
    return click.Option([name, *field.metadata.get("flags", ())], show_default=True, **settings)


def json_option(text: str) -> dict[str, Any]:
    """Parse an option's JSON object."""
    try:
        return json_object(text)
    except (ValueError, RecursionError):
        raise click.BadParameter(f"{text!r} is not a JSON object.") from None


def parse_file_name(text: str) -> str:
    """Parse an option's file name. Reject an empty name, which a shell passes for an unset variable."""
    if not text or "\0" in text:
        raise click.BadParameter(f"{text!r} is not the name of a file.")
    return text


def parse_size_option(text: str | int) -> int:
    """Parse an option's number, such as 4096, 4k or 2GiB."""
    try:
        return int(text) if isinstance(text, int) or text.removeprefix("-").isdecimal() else parse_size(text)
    except ValueError as error:
        raise click.BadParameter(f"{error}.") from None


def parse_gibibytes(text: str | float) -> float:
    """Return an option's value in GiB. A text with a unit, such as 512MiB, is converted."""
    return parse_size_option(text) / 2**30 if isinstance(text, str) and text[-1:].isalpha() else float(text)


SIZE, GIB = click.types.FuncParamType(parse_size_option), click.types.FuncParamType(parse_gibibytes)
SIZE.name, GIB.name = "size", "size in GiB"
PATH = click.types.FuncParamType(parse_file_name)
PATH.name = "path"  # shown in --help


def options(dataclass: "type[DataclassInstance]", **changes: dict[str, Any]) -> list[click.Parameter]:
    """Return an option for each field of a dataclass that has help text.

    `changes` maps the name of a field to the `changes` that option() gets for it.
    """
    return [option(field, **changes.get(field.name, {})) for field in fields(dataclass) if "help" in field.metadata]


def engine_options(**changes: dict[str, Any]) -> list[click.Parameter]:
    """Return the engine's options and --revision. Defaults that depend on the device are left unset."""
    revision = click.Option(["--revision"], help="branch, tag or commit of a model on the hub")
    without_defaults: dict[str, dict[str, Any]] = {name: {"default": None} for name in ("device", *DEFAULTS_ON_CUDA)}
    return [revision, *options(EngineConfig, **without_defaults | changes)]


def sampling_options(**defaults: Any) -> list[click.Parameter]:
    """Return the options of SamplingParams. `defaults` replace the defaults of its fields.

    There is no option for the seed of a request: with one seed, all requests would draw the same tokens.
    """
    return [
        *options(SamplingParams, **{name: {"default": default} for name, default in defaults.items()}),
        click.Option(["--stop"], multiple=True, help="string that ends an output; may be given several times"),
        click.Option(["--stop-token-ids"], type=int, multiple=True, help="id of a token that ends an output"),
        click.Option(["--ignore-eos"], is_flag=True, help="continue after the end-of-text token"),
    ]


def vllm_options(known: list[click.Parameter]) -> list[click.Parameter]:
    """Return hidden options for the flags of `vllm serve` that are not among the `known` options."""
    known_names = {"served_model_name", *(option.name for option in known)}
    vllm_fields = {field.name: field for args in (EngineArgs, ServeCompatibilityOptions) for field in fields(args)}
    return [option(field, hidden=True) for name, field in vllm_fields.items() if name not in known_names]


def stats_option() -> click.Option:
    seconds = click.FloatRange(min=0, min_open=True)
    help = "print the engine's state on standard error every SECONDS seconds"
    return click.Option(["--stats"], type=seconds, metavar="SECONDS", help=help)


def split(values: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split the values of a command's options into those of the engine and the others."""
    engine_names = {"revision", *(field.name for field in fields(EngineConfig))}
    engine = {name: value for name, value in values.items() if name in engine_names}
    return engine, {name: value for name, value in values.items() if name not in engine_names}


def with_checkpoint(engine: dict[str, Any]) -> dict[str, Any]:
    """Return engine options, without the revision, and with the checkpoint's folder as the model.

    A model on the hub is downloaded if needed. Raise ValueError if there is no such checkpoint.
    """
    from ..checkpoints.hub import find_checkpoint

    others = {name: value for name, value in engine.items() if name != "revision"}
    return others | {"model": str(find_checkpoint(engine["model"], engine["revision"], others.get("hf_overrides")))}


@contextmanager
def usage_errors() -> Iterator[None]:
    """Turn OSError, ValueError and a missing package into click.UsageError: one line of text, and exit status 2."""
    try:
        yield
    except (OSError, ValueError) as error:
        raise click.UsageError(str(error)) from None
    except ModuleNotFoundError as error:
        extra = {"aiohttp": "bench", "ray": "ray", "pyarrow": "ray"}.get(error.name or "", "serve")
        hint = f"pip install '.[{extra}]' in nanovllm's repository"
        raise click.UsageError(f"{error.name} is not installed: {hint}") from None
