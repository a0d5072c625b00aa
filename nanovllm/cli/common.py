"""What the commands share: one line for what the caller did wrong, and the engine that the flags ask for."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click


def find_checkpoint(model: str) -> None:
    """Raises ValueError if there is no such folder: the default's path is that of this repository."""
    if not Path(model).is_dir():
        raise ValueError(f"there is no folder {Path(model).absolute()}: name a checkpoint with --model")


@contextmanager
def one_line_errors() -> Iterator[None]:
    """What the caller did wrong ends the command with one line and exit status 2."""
    try:
        yield
    except (OSError, ValueError) as error:
        raise click.UsageError(str(error)) from None
