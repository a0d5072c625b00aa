"""What the commands of nanovllm bench share: their options, and how they run."""

from collections.abc import Callable
from typing import Any

import click

from .common import located, one_line_errors
from .flags import engine_flags, split
from .streams import standard_output

WHOLE = click.IntRange(min=1)


def size(name: str, default: int, help: str) -> click.Option:
    return click.Option([name], type=WHOLE, default=default, show_default=True, help=help)


PEER = click.Option(["--peer/--no-peer"], default=True, show_default=True, help="measure transformers too")
JSON = click.Option(["--json", "json_file"], metavar="PATH", help="write all numbers as JSON; - is standard output")


def shared(rounds: int, peer: click.Option | None = PEER) -> list[click.Parameter]:
    """The options of every benchmark that has an engine."""
    return [
        size("--rounds", rounds, "rounds; what is compared takes turns, and medians are told"),
        *([peer] if peer else []),
        JSON,
        *engine_flags(),
    ]


def run(name: str, values: dict[str, Any]) -> int:
    """Measure with an engine, print a table, and write JSON if that is asked for."""
    json_file = values.pop("json_file")
    engine, settings = split(values)

    def measured() -> dict[str, Any]:
        from .benchmarks import measure

        return measure(name, located(engine), **settings)

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
