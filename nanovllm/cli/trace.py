"""nanovllm trace: summarize or convert a file of events. The option --trace of other commands records one."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import click

from ..trace import read_trace, traced
from ..trace.chrome import as_lines, convert
from ..trace.events import Event, FileSink
from .click_options import usage_errors

if TYPE_CHECKING:
    from ..llm import LLM

COUNTED = {
    "step": "steps",
    "arrive": "sequences",
    "token": "tokens",
    "preempt": "preemptions",
    "hit": "blocks hit",
    "copied": "blocks copied",
    "stored": "blocks stored",
    "loaded": "blocks loaded",
}

trace_option = click.option("--trace", metavar="FILE", help="write the engine's events to a file")


@click.command()
@click.argument("file")
@click.option("--chrome", metavar="PATH", help="convert it to this file, for chrome://tracing and ui.perfetto.dev")
def trace(file: str, chrome: str | None) -> int:
    """Summarize a trace, or convert it for a viewer.

    Record FILE with --trace: nanovllm generate --trace FILE
    """
    with usage_errors():
        events = list(read_trace(file))
        if chrome is not None:
            lines = chrome_lines(events, file)
            with open(chrome, "x", encoding="utf-8") as target:
                target.writelines(lines)
    counts = Counter(event["kind"] for event in events)
    totals = ", ".join(f"{words} {counts[kind]:,}" for kind, words in COUNTED.items() if counts[kind])
    click.echo(f"{events[0]['stage']}: {totals or 'nothing happened'}")
    return 0


def chrome_lines(events: list[Event], file: str) -> Iterator[str]:
    """Return the lines of a trace for Chrome. Raise ValueError if events are missing or changed."""
    try:
        return as_lines(convert(events))
    except (LookupError, ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"{file}: events are missing or changed: {type(error).__name__}: {error}") from None


class Tracing:
    """The file of --trace. An error in writing it does not stop the run."""

    failed = False  # the trace is incomplete

    def __init__(self, file: str | None) -> None:
        """Raise ValueError or OSError now, before anything is computed, if the file cannot be written."""
        self._file = file
        if file is not None:
            with FileSink(file):
                pass

    @contextmanager
    def of(self, llm: "LLM") -> Iterator[None]:
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
            click.echo(f"error: cannot write the trace: {error}", err=True)
