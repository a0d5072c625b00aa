"""What the commands share: their flags, and one line for what the caller did wrong."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from ..api.params import SamplingParams
from ..checkpoints import hub as checkpoints
from ..core.config import EngineConfig
from ..core.flags import knobs
from .flags import flags


def sampling_flags(**defaults: Any) -> list[click.Parameter]:
    """The fields of SamplingParams; but a seed is the engine's, or every request would draw the same."""
    return [
        *flags(SamplingParams, **defaults),
        click.Option(["--stop"], multiple=True, help="a text that ends an output; may be given several times"),
        click.Option(["--stop-token-ids"], type=int, multiple=True, help="a token that ends an output; likewise"),
        click.Option(["--ignore-eos"], is_flag=True, help="go on after the token that ends a text"),
    ]


def engine_flags() -> list[click.Parameter]:
    return flags(EngineConfig)


def split(values: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The values of all flags into those of the engine and those of SamplingParams."""
    engine = {option.name: values[option.name] for option in knobs(EngineConfig)}
    return engine, {name: value for name, value in values.items() if name not in engine}


def find_checkpoint(model: str) -> str:
    """The folder of a checkpoint, or of a name of the hub. Raises ValueError if there is none.

    The default's path is that of this repository.
    """
    if model == EngineConfig.model and not Path(model).is_dir():
        raise ValueError(f"there is no folder {Path(model).absolute()}: name a checkpoint with --model")
    return str(checkpoints.find_checkpoint(model))


@contextmanager
def one_line_errors() -> Iterator[None]:
    """What the caller did wrong ends the command with one line and exit status 2."""
    try:
        yield
    except (OSError, ValueError) as error:
        raise click.UsageError(str(error)) from None
