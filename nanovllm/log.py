"""Lines on standard error for the person who runs a command: tell(), and the server's logger."""

import logging
import os
import select
import sys
from contextlib import suppress

LEVELS = ("debug", "info", "warning", "error")


def tell(line: str, is_after_key: bool = False) -> None:
    """Print a line on standard error. Ignore errors of the write.

    After a key such as Ctrl-C, which the terminal has echoed, start a new line first.
    """
    start = "\n" if is_after_key and sys.stderr.isatty() else ""
    try:
        sys.stderr.write(start + " ".join(line.splitlines()) + "\n")
        sys.stderr.flush()
    except OSError:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115  # or Python retries the write when it exits


class Lines(logging.Handler):
    """A handler that prints each message as a line.

    It drops a line that would have to wait, so that a full pipe that nobody reads never stops a server.
    """

    def emit(self, record: logging.LogRecord) -> None:
        """Print the message."""
        can_write = [True]
        with suppress(OSError, ValueError):  # a stream of Python's own is always ready
            can_write = select.select([], [sys.stderr], [], 0)[1]
        if can_write:
            tell(self.format(record))


logger = logging.getLogger("nanovllm")
logger.setLevel(logging.INFO)
logger.addHandler(Lines())
