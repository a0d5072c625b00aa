"""nanovllm trace: what a file of events holds, and the same for the viewers of Chrome and Perfetto."""

from collections import Counter
from collections.abc import Iterator

import click

from ..trace import read_trace
from ..trace.chrome import as_lines, convert
from ..trace.replay import Event
from .common import one_line_errors

TOLD = {"step": "steps", "arrive": "sequences", "token": "tokens", "preempt": "preemptions", "hit": "blocks hit"}
TOLD |= {"copied": "blocks copied", "stored": "blocks stored", "loaded": "blocks loaded"}


@click.command()
@click.argument("file")
@click.option("--chrome", metavar="PATH", help="write it for chrome://tracing and ui.perfetto.dev, to this file")
def trace(file: str, chrome: str | None) -> int:
    """Say what a trace holds, or convert it for a viewer.

    FILE was written with --trace: nanovllm generate --trace FILE
    """
    with one_line_errors():
        events = list(read_trace(file))
        if chrome is not None:
            lines = lines_for_viewers(events, file)
            with open(chrome, "x", encoding="utf-8") as target:
                target.writelines(lines)
    counts = Counter(event["kind"] for event in events)
    told = ", ".join(f"{words} {counts[kind]:,}" for kind, words in TOLD.items() if counts[kind])
    click.echo(f"{events[0]['stage']}: {told or 'nothing happened'}")
    return 0


def lines_for_viewers(events: list[Event], file: str) -> Iterator[str]:
    """Raises ValueError if events are missing: a block is given back that nobody has taken, say."""
    try:
        return as_lines(convert(events))
    except (LookupError, ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"{file}: events are missing or changed: {type(error).__name__}: {error}") from None
