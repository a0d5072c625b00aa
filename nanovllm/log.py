"""Messages to the user on standard error: single lines with tell(), the package's logger, and progress bars."""

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
BAR_DELAY_SECONDS, LINE_INTERVAL_SECONDS = 1.0, 10.0  # before a bar appears, and between progress lines


def tell(line: str, is_after_key: bool = False) -> None:
    """Print a line on standard error, ignoring write errors.

    With `is_after_key`, start a new line first, because the terminal has just echoed a key such as Ctrl-C.
    """
    start = "\n" if is_after_key and sys.stderr.isatty() else ""
    try:
        sys.stderr.write(start + " ".join(line.splitlines()) + "\n")
        sys.stderr.flush()
    except OSError:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115  # otherwise, Python retries the write at exit


class LineHandler(logging.Handler):
    """A logging handler that prints each message on one line.

    It drops the message if standard error is a full pipe: waiting would stall a server whose output nobody reads.
    """

    def emit(self, record: logging.LogRecord) -> None:
        """Print the message."""
        with suppress(OSError, ValueError):  # a stream without a file descriptor is always ready
            if not select.select([], [sys.stderr], [], 0)[1]:
                return
        tell(self.format(record))


logger = logging.getLogger("nanovllm")
logger.setLevel(logging.INFO)
logger.addHandler(LineHandler())


def with_progress(items: Collection[Item], description: str) -> Iterator[Item]:
    """Yield the items, and show how many have been yielded: as a bar in a terminal, or as lines in a log file."""
    if sys.stderr.isatty() and logger.isEnabledFor(logging.INFO):
        from tqdm import tqdm

        yield from tqdm(items, description, delay=BAR_DELAY_SECONDS, leave=False, dynamic_ncols=True)
        return
    last_line_time = time.monotonic()
    for i, item in enumerate(items):
        if time.monotonic() - last_line_time >= LINE_INTERVAL_SECONDS:
            last_line_time = time.monotonic()
            logger.info(f"{description}: {i / len(items):.0%}")
        yield item
