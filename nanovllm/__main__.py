"""The command `nanovllm`. Its subcommands are in cli/."""

import os
import signal
import sys
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit status. Print an expected error as one line on standard error."""
    from .cli.terminal import exit_immediately, signal_handled_by

    with signal_handled_by(exit_immediately):
        from .cli.commands import run

        return run(arguments)


def limit_openmp_spinning() -> None:
    """Make waiting OpenMP threads sleep after a short spin, unless the environment sets its own policy.

    A spinning thread occupies a core that another process, or a kernel's helper thread, could use. OpenMP reads the
    setting when torch is imported.
    """
    if not {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} & {*os.environ}:
        os.environ["GOMP_SPINCOUNT"] = "1000"  # about a microsecond


def console() -> None:
    """Run the command as a process. Ctrl-C prints at most one line, from the first import until Python exits."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Python's own handler would print a traceback
    from .cli import terminal  # noqa: F401  # slow to import, and main() needs its handler

    limit_openmp_spinning()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # until Python has exited; main() sets its own handler while it runs
    sys.exit(main())


if __name__ == "__main__":
    console()
