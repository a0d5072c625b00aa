"""nanovllm trace: summarize or convert a file of events, which other commands record with --trace."""

import json
from collections import Counter
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

import click

from ..trace import read_trace, traced
from ..trace.chrome import convert
from ..trace.events import FileSink
from .click_options import PATH, usage_errors

if TYPE_CHECKING:
    from ..llm import LLM

COUNT_LABELS = {  # by kind of event: the words before the count in the summary
    "step": "steps",
    "arrive": "sequences",
    "token": "tokens",
    "preempt": "preemptions",
    "hit": "blocks hit",
    "copied": "blocks copied",
    "stored": "blocks stored",
    "loaded": "blocks loaded",
}

trace_option = click.option("--trace", type=PATH, metavar="FILE", help="write the engine's events to a file")


@click.command()
@click.argument("file", type=PATH)
@click.option("--chrome", type=PATH, help="convert the trace to this file, for chrome://tracing and ui.perfetto.dev")
def trace(file: str, chrome: str | None) -> int:
    """Summarize a trace, or convert it for a viewer.

    Record FILE with --trace: nanovllm generate --trace FILE
    """
    with usage_errors():
        events = list(read_trace(file))
        if chrome is not None:
            try:
                converted = json.dumps(convert(events), separators=(",", ":"))
            except (LookupError, ValueError, TypeError, AttributeError) as error:
                raise ValueError(f"{file}: events are missing or changed: {type(error).__name__}: {error}") from None
            with open(chrome, "x", encoding="utf-8") as chrome_file:
                chrome_file.write(converted + "\n")
    counts = Counter(event["kind"] for event in events)
    totals = ", ".join(f"{label} {counts[kind]:,}" for kind, label in COUNT_LABELS.items() if counts[kind])
    click.echo(f"{events[0]['stage']}: {totals or 'nothing happened'}")
    return 0


def check_trace(file: str | None) -> None:
    """Raise ValueError or OSError, before anything is computed, if the file of --trace cannot be written."""
    if file is not None:
        with FileSink(file):
            pass


def tracing(llm: "LLM", file: str | None) -> AbstractContextManager[object]:
    """Record the events of `llm` in the block, if there is a file. Raise a write error at the end of the block."""
    return nullcontext() if file is None else traced(llm, file)
