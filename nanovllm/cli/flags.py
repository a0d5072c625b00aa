"""Options of the command line: a knob of the engine, max_num_seqs, becomes --max-num-seqs."""

from typing import Any

import click

from .knob import Knob
from .knobs import ENGINE, KERNELS, SAMPLING, SERVER


def flag(knob: Knob, default: Any) -> click.Option:
    """The option of one knob; a knob that is on or off has two names."""
    name = "--" + knob.name.replace("_", "-")
    if knob.kind is bool:
        name = f"{name}/--no-{name[2:]}"
    type_ = click.Choice(knob.choices) if knob.choices else knob.kind
    return click.Option([name], type=type_, default=default, show_default=True, help=knob.help)


def sampling_flags(**defaults: Any) -> list[click.Parameter]:
    """The fields of SamplingParams; but a seed is the engine's, or every request would draw the same."""
    return [
        *(flag(knob, defaults.get(knob.name, knob.default)) for knob in SAMPLING),
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
    knobs = map(as_here, ENGINE + KERNELS)
    return [revision, *(flag(knob, defaults.get(knob.name, knob.default)) for knob in knobs)]


def server_flags() -> list[click.Parameter]:
    return [flag(knob, knob.default) for knob in SERVER]


def as_here(knob: Knob) -> Knob:
    """What is more than in the stages: a model may be one of the hub, and a device not given is LLM's to choose."""
    if knob.name == "model":
        return knob._replace(help="checkpoint folder, or a name of the hub, ORG/NAME")
    if knob.name == "device":
        return knob._replace(default=None, help=f"{knob.help}; default: the GPU where there is one")
    return knob


def split(values: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The values of all flags into those of the engine and the others, of SamplingParams say."""
    engine = {name: values[name] for name in ("revision", *(knob.name for knob in ENGINE + KERNELS))}
    return engine, {name: value for name, value in values.items() if name not in engine}
