"""Lines on standard error for the person who runs a command: tell(), the server's logger, and progress."""

import logging
import os
import select
import sys
import time
from collections.abc import Collection, Iterator
from contextlib import suppress
from typing import TypeVar

Item = TypeVar("Item")
LEVELS = ("debug", "info", "warning", "error")
BAR_DELAY, LINE_SECONDS = 1.0, 10.0  # before a bar appears, and between two lines


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
        with suppress(OSError, ValueError):  # a stream of Python's own is always ready
            if not select.select([], [sys.stderr], [], 0)[1]:
                return
        tell(self.format(record))


logger = logging.getLogger("nanovllm")
logger.setLevel(logging.INFO)
logger.addHandler(Lines())


def with_progress(items: Collection[Item], description: str) -> Iterator[Item]:
    """Yield the items, and show how many are done: with a bar in a terminal, and with lines in a log file."""
    if sys.stderr.isatty() and logger.isEnabledFor(logging.INFO):
        from tqdm import tqdm

        yield from tqdm(items, description, delay=BAR_DELAY, leave=False, dynamic_ncols=True)
        return
    last = time.monotonic()
    for i, item in enumerate(items):
        if time.monotonic() - last >= LINE_SECONDS:
            last = time.monotonic()
            logger.info(f"{description}: {i / len(items):.0%}")
        yield item
