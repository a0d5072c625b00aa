"""The command: nanovllm generate | batch."""

import sys
from collections.abc import Sequence

from .cli.interrupts import INTERRUPTED, ctrl_c_ends_at_once


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status. A mistake is told in one line."""
    with ctrl_c_ends_at_once():
        from .cli.commands import run
    try:
        return run(arguments)
    except KeyboardInterrupt:
        return INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
