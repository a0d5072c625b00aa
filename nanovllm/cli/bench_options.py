"""What the commands of nanovllm bench share: their options, and how they run."""

from collections.abc import Callable
from typing import Any

import click

from ..checkpoints.sizes import SHAPES
from ..engine.config import EngineConfig
from .common import located, one_line_errors
from .flags import engine_flags, split
from .streams import standard_output

SHIPPED = EngineConfig.model
WHOLE = click.IntRange(min=1)


def size(name: str, default: int, help: str) -> click.Option:
    return click.Option([name], type=WHOLE, default=default, show_default=True, help=help)


PEER = click.Option(["--peer/--no-peer"], default=True, show_default=True, help="measure transformers too")
JSON = click.Option(["--json", "json_file"], metavar="PATH", help="write all numbers as JSON; - is standard output")


def shape_option(help: str, default: str | None = None) -> click.Option:
    names = click.Choice([*SHAPES])
    return click.Option(["--shape"], type=names, default=default, show_default=True, metavar="NAME", help=help)


def shared(rounds: int, peer: click.Option | None = PEER, **defaults: Any) -> list[click.Parameter]:
    """The options of every benchmark that has an engine. `defaults` are those of the engine's."""
    return [
        size("--rounds", rounds, "rounds; what is compared takes turns, and medians are told"),
        *([peer] if peer else []),
        JSON,
        *engine_flags(**defaults),
    ]


def run(name: str, values: dict[str, Any], default_shape: str | None = None) -> int:
    """Measure with an engine, print a table, and write JSON if that is asked for."""
    json_file, shape = values.pop("json_file"), values.pop("shape", None)
    engine, settings = split(values)

    def measured() -> dict[str, Any]:
        from .benchmarks import measure

        return measure(name, with_model(engine, shape, default_shape), **settings)

    show(measured, json_file)
    return 0


def show(measure: Callable[[], dict[str, Any]], json_file: str | None) -> dict[str, Any]:
    """What was measured, in a table and as JSON. That numbers cannot be written is told before they are measured."""
    with one_line_errors():
        standard_output()
        if json_file not in (None, "-"):
            open(json_file, "a").close()

    from .benchmarks import table, write_json

    with one_line_errors():
        found = measure()
    if json_file:
        write_json(found, json_file)
    click.echo(table(found), err=json_file == "-")
    return found


def with_model(engine: dict[str, Any], shape: str | None, default_shape: str | None) -> dict[str, Any]:
    """The engine's options with a folder as model: a checkpoint's, or one of a shape, for random weights.

    Raises ValueError if both are asked for, or the checkpoint is not to be had.
    """
    if shape is not None and engine["model"] is not None:
        raise ValueError(f"--shape {shape} and --model {engine['model']}: give one of them")
    shape = shape or (default_shape if engine["model"] is None else None)
    if shape is None:
        return located(engine | {"model": engine["model"] or SHIPPED})
    from .benchmarks.shapes import folder_of_shape

    random_weights = {"model": str(folder_of_shape(shape)), "load_format": "dummy", "skip_tokenizer_init": True}
    return {name: value for name, value in engine.items() if name != "revision"} | random_weights
