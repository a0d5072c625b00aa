"""tell(): a line on standard error for the person who runs a command."""

import os
import sys


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
