"""The command nanovllm; cli/commands.py lists its commands."""

import os
import signal
import sys
from collections.abc import Sequence

from .cli.interrupts import ctrl_c_ends_at_once, end_at_once


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command, and return its exit status. A mistake of the user is one line on standard error."""
    with ctrl_c_ends_at_once():
        from .cli.commands import run

        return run(arguments)


def spin_shortly() -> None:
    """Make OpenMP's threads sleep soon when they wait, unless the environment says otherwise, before torch is imported.

    A thread that spins holds a core that another one wants: another process, or a helper of the kernels.
    """
    if not {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} & {*os.environ}:
        os.environ["GOMP_SPINCOUNT"] = "1000"  # about a microsecond


def console() -> None:
    """Run the command as a process: Ctrl-C is quiet from the first import until Python has ended."""
    spin_shortly()
    signal.signal(signal.SIGINT, end_at_once)
    status = main()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # all is done: only the status is left to say
    sys.exit(status)


if __name__ == "__main__":
    console()
