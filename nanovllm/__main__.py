"""The command nanovllm; cli/commands.py has the list of what it does."""

import os
import signal
import sys
from collections.abc import Sequence

from .cli.interrupts import ctrl_c_ends_at_once, end_at_once


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status. A mistake is told in one line."""
    with ctrl_c_ends_at_once():
        from .cli.commands import run

        return run(arguments)


def spin_shortly() -> None:
    """Let OpenMP's threads sleep soon while they wait, unless the environment says how. Torch reads it when imported.

    A thread that spins holds a core that another one wants: another process, or a helper of the kernels.
    """
    if not {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} & {*os.environ}:
        os.environ["GOMP_SPINCOUNT"] = "1000"  # about a microsecond


def console() -> None:
    """The command as a process: Ctrl-C is quiet from the first import until Python has ended."""
    spin_shortly()
    signal.signal(signal.SIGINT, end_at_once)
    status = main()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # all is done: only the status is left to say
    sys.exit(status)


if __name__ == "__main__":
    console()
