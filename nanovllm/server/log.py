"""tell(): a line for the person who runs the server, or a command, on standard error."""

import os
import sys


def tell(line: str, is_after_key: bool = False) -> None:
    """Print a line on standard error. Ignore an error of writing it.

    After a key such as Ctrl-C, which the terminal has shown on the line, begin a new one.
    """
    start = "\n" if is_after_key and sys.stderr.isatty() else ""
    try:
        sys.stderr.write(start + " ".join(line.splitlines()) + "\n")
        sys.stderr.flush()
    except OSError:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115  # or Python tries the write again when it ends
