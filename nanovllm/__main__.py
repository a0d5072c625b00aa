"""The command: nanovllm generate | batch."""

import sys
from collections.abc import Sequence

import click

from .batch import batch
from .generate import generate

INTERRUPTED = 130  # what a shell says of a command that Ctrl-C has ended


@click.group(invoke_without_command=True, commands=[generate, batch])
@click.pass_context
def nanovllm(context: click.Context) -> None:
    """A small LLM engine: continuous batching, shared blocks, a prefix cache, and a second tier on the host."""
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status. A mistake is told in one line."""
    try:
        return nanovllm.main(arguments, prog_name="nanovllm", standalone_mode=False) or 0
    except click.ClickException as mistake:
        click.echo(f"error: {mistake.format_message()}", err=True)
        return mistake.exit_code
    except click.Abort:
        return INTERRUPTED
    except OSError as error:  # of a write, to a full disk say
        sys.stdout = None  # or Python tries it again when it ends
        click.echo(f"error: {error}", err=True)
        return 1


if __name__ == "__main__":
    sys.exit(main())
