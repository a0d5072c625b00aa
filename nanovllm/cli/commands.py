"""The commands as one program. Each is imported when it is called: what needs no engine waits for none."""

import sys
from collections.abc import Sequence
from importlib import import_module

import click

from .. import __version__
from .interrupts import INTERRUPTED, ctrl_c_ends_at_once
from .streams import show_what_can_be_shown

COMMANDS = {  # each in a file of its name, and what the list says of it
    "batch": "Serve a file of requests; the results are lines of JSON.",
    "generate": "Go on from each PROMPT, or from six beginnings.",
    "trace": "Say what a trace holds, or convert it for a viewer.",
}


class Commands(click.Group):
    def list_commands(self, context: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        if name not in COMMANDS:
            return None
        with ctrl_c_ends_at_once():  # it imports torch
            return getattr(import_module(f".{name}", __package__), name)

    def format_commands(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


@click.group(cls=Commands, invoke_without_command=True)
@click.version_option(__version__, message="%(prog)s %(version)s")
@click.pass_context
def nanovllm(context: click.Context) -> None:
    """A small LLM engine: continuous batching, shared blocks, a prefix cache, and a second tier on the host."""
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


def run(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status. A mistake is told in one line."""
    show_what_can_be_shown()
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
