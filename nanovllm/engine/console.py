"""run_command: a command that ends in an exit status, never in a traceback, whatever becomes of its terminal."""

import io
import sys
from collections.abc import Callable

INTERRUPTED, READER_LEFT = 130, 141  # what a shell says of a command that SIGINT, or SIGPIPE, has ended


def run_command(command: Callable[[], int]) -> int:
    """Run `command`. Returns its exit status, or that of a signal: Ctrl-C, or a closed pipe behind stdout.

    A letter that the terminal's encoding does not have is printed as a question mark.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):  # None if the shell has closed it
        sys.stdout.reconfigure(errors="replace")
    try:
        try:
            return command()
        finally:  # also of an exit: argparse ends --help so
            print(end="", flush=True)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        sys.stdout = None  # or Python writes what is left when it ends, and fails again
        return READER_LEFT
    except OSError as error:  # a full disk, a file that may not be read
        sys.stdout = None
        print(f"error: {error}", file=sys.stderr)
        return 1
