"""What Ctrl-C does, where a KeyboardInterrupt in the middle of things would do harm."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Event
from typing import Any

INTERRUPTED = 130  # what a shell says of a command that Ctrl-C has ended


@contextmanager
def ctrl_c_ends_at_once() -> Iterator[None]:
    """For imports: interrupted in its middle, torch prints a traceback, or tells another error."""
    before = signal.signal(signal.SIGINT, lambda *_: os._exit(INTERRUPTED))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def ctrl_c_noted() -> Iterator[Event]:
    """The first Ctrl-C sets the event, so that a step and its results are not cut. The second ends the command."""

    def note(*_: Any) -> None:
        interrupted.set()
        signal.signal(signal.SIGINT, before)

    interrupted, before = Event(), signal.getsignal(signal.SIGINT)
    signal.signal(signal.SIGINT, note)
    try:
        yield interrupted
    finally:
        signal.signal(signal.SIGINT, before)
