"""What the commands share: where the checkpoint lies, and one line for what the caller did wrong."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import click


def located(engine: dict[str, Any]) -> dict[str, Any]:
    """The engine's options, with the folder of its checkpoint: that of a name of the hub is fetched.

    Raises ValueError if there is none.
    """
    from ..checkpoints.hub import find_checkpoint

    options = {name: value for name, value in engine.items() if name != "revision"}
    return options | {"model": str(find_checkpoint(engine["model"], engine["revision"]))}


@contextmanager
def one_line_errors() -> Iterator[None]:
    """What the caller did wrong ends the command with one line and exit status 2."""
    try:
        yield
    except (OSError, ValueError) as error:
        raise click.UsageError(str(error)) from None
