"""--trace FILE: what the engine does, as a file of events. A file that fails does not end the run."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import click

from ..trace import traced
from ..trace.events import FileSink

trace_option = click.option("--trace", metavar="FILE", help="write what the engine does to a file, as events")


class Tracing:
    failed = False  # the trace is not whole

    def __init__(self, file: str | None) -> None:
        """Raises ValueError or OSError, before anything is computed, for a file that it cannot or must not write."""
        self._file = file
        if file is not None:
            with FileSink(file):
                pass

    @contextmanager
    def of(self, llm: Any) -> Iterator[None]:
        """Trace `llm` in the block, if there is a file."""
        if self._file is None:
            yield
            return
        is_done = False
        try:
            with traced(llm, self._file):
                yield
                is_done = True
        except OSError as error:
            if not is_done:
                raise
            self.failed = True
            click.echo(f"error: the trace: {error}", err=True)
