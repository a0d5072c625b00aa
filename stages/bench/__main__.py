"""Measure the stages, by table, or the package, by benchmark: `python -m stages.bench --help` lists both."""

import sys

from nanovllm.__main__ import limit_openmp_spinning
from nanovllm.cli.commands import run
from nanovllm.cli.terminal import exit_immediately, signal_handled_by
from stages.bench.commands import bench


def main(arguments: list[str] | None = None) -> int:
    """Measure what the arguments name. Return the exit status."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if {*arguments[:1]} & {*bench.commands}:
        with signal_handled_by(exit_immediately):
            return run(arguments, bench)
    from stages.bench import tables

    return tables.main(arguments)


if __name__ == "__main__":
    if {*sys.argv[1:2]} & {*bench.commands}:
        limit_openmp_spinning()
    sys.exit(main())
