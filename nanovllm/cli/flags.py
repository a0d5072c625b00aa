"""Options of the command line: a knob of the engine, max_num_seqs, becomes --max-num-seqs."""

from dataclasses import Field
from types import NoneType
from typing import Any, get_args

import click

from ..engine.checks import knobs
from ..engine.config import EngineConfig
from ..engine.sampling_params import SamplingParams
from ..server.options import ServerOptions

DEVICE = "where the model and the pool are: cpu, cuda, mps; default: the GPU where there is one"
HUB = {  # EngineConfig has a folder and a device; a command finds them
    "model": {"help": "checkpoint folder, or a name of the hub, ORG/NAME"},
    "device": {"default": None, "help": DEVICE},
}


def flag(knob: Field, **changes: Any) -> click.Option:
    """Return the option of one knob; a knob that is on or off has two names. `changes` are of help and default."""
    name = "--" + knob.name.replace("_", "-")
    kind = next(kind for kind in get_args(knob.type) or (knob.type,) if kind is not NoneType)
    if kind is bool:
        name = f"{name}/--no-{name[2:]}"
    choices = knob.metadata["choices"]
    options = {"default": knob.default, "help": knob.metadata["help"]} | changes
    return click.Option([name], type=click.Choice(choices) if choices else kind, show_default=True, **options)


def sampling_flags(**defaults: Any) -> list[click.Parameter]:
    """The fields of SamplingParams; but a seed is the engine's, or every request would draw the same."""
    return [
        *(flag(knob, default=defaults.get(knob.name, knob.default)) for knob in knobs(SamplingParams)),
        click.Option(["--stop"], multiple=True, help="a text that ends an output; may be given several times"),
        click.Option(["--stop-token-ids"], type=int, multiple=True, help="a token that ends an output; likewise"),
        click.Option(["--ignore-eos"], is_flag=True, help="go on after the token that ends a text"),
    ]


def chosen_sampling_flags() -> list[click.Parameter]:
    """The same without defaults: what is not given is the model's own. A chat has one answer."""
    options = [option for option in sampling_flags() if option.name != "n"]
    for option in options:
        option.default = None if option.default != () else ()
    return options


def stats_flag() -> click.Option:
    seconds = click.FloatRange(min=0, min_open=True)
    return click.Option(["--stats"], type=seconds, metavar="SECONDS", help="tell the engine's state on standard error")


def engine_flags(**defaults: Any) -> list[click.Parameter]:
    revision = click.Option(["--revision"], help="of a model of the hub: a branch, a tag or a commit")
    given = {name: {"default": default} for name, default in defaults.items()}
    return [
        revision,
        *(flag(knob, **(HUB.get(knob.name, {}) | given.get(knob.name, {}))) for knob in knobs(EngineConfig)),
    ]


def server_flags() -> list[click.Parameter]:
    return [flag(knob) for knob in knobs(ServerOptions)]


def split(values: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The values of all flags into those of the engine and the others, of SamplingParams say."""
    engine = {name: values[name] for name in ("revision", *(knob.name for knob in knobs(EngineConfig)))}
    return engine, {name: value for name, value in values.items() if name not in engine}
