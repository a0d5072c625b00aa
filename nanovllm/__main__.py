"""The command `nanovllm`. Its subcommands are in cli/."""

import os
import signal
import sys
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit status. A user's error prints one line to standard error."""
    from .cli.terminal import end_at_once, handled_by

    with handled_by(end_at_once):
        from .cli.commands import run

        return run(arguments)


def shorten_spinning() -> None:
    """Make OpenMP's threads sleep soon when they wait, unless the environment decides otherwise.

    A spinning thread occupies a core that another process, or a kernel's helper thread, could use. OpenMP reads this
    when torch is imported.
    """
    if not {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} & {*os.environ}:
        os.environ["GOMP_SPINCOUNT"] = "1000"  # about a microsecond


def console() -> None:
    """Run the command as a process: Ctrl-C prints one line at most from the first import until Python has ended."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Python's own handler would print a traceback
    from .cli import terminal  # noqa: F401  # main() needs it for its handler, and the import takes a moment

    shorten_spinning()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # restored after main(), when only the status is left to return
    sys.exit(main())


if __name__ == "__main__":
    console()
