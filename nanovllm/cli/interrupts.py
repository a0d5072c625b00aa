"""What Ctrl-C does: it ends the command at once, unless there is something to put in order first."""

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from threading import Event
from typing import Any

INTERRUPTED = 130  # what a shell says of a command that Ctrl-C has ended


def end_at_once(*_: Any) -> None:
    """A handler of SIGINT for what leaves nothing half done: imports, loading a model, judging a file, measuring.

    A KeyboardInterrupt there may come out as another error, or as a traceback that Python prints and then forgets.
    """
    with suppress(OSError):
        os.write(2, b"\ninterrupted\n" if os.isatty(2) else b"interrupted\n")  # a terminal has shown ^C in this line
    os._exit(INTERRUPTED)


def raise_once(*_: Any) -> None:
    """A handler of SIGINT: the first press raises KeyboardInterrupt, a second one does not wait for what follows."""
    signal.signal(signal.SIGINT, end_at_once)
    raise KeyboardInterrupt


@contextmanager
def handled_by(handler: Callable[..., None], number: int = signal.SIGINT) -> Iterator[None]:
    before = signal.signal(number, handler)
    try:
        yield
    finally:
        signal.signal(number, before)


def ctrl_c_ends_at_once() -> Any:
    return handled_by(end_at_once)


def sigterm_ends_at_once() -> Any:
    """For a server that serves nobody yet. In a container it is process 1: a signal that it does not handle is lost."""

    def end(*_: Any) -> None:
        os._exit(0)

    return handled_by(end, signal.SIGTERM)


def ctrl_c_raises() -> Any:
    """For a run that has files to close."""
    return handled_by(raise_once)


@contextmanager
def ctrl_c_noted() -> Iterator[Event]:
    """The first Ctrl-C sets the event, so that a step and its results are not cut. The second ends the command."""

    def note(*_: Any) -> None:
        interrupted.set()
        signal.signal(signal.SIGINT, raise_once)

    interrupted = Event()
    with handled_by(note):
        yield interrupted
