"""The commands as one program. Each is imported when it is called, and imports the engine when it runs."""

import sys
from collections.abc import Sequence
from importlib import import_module

import click

from .. import __version__
from ..log import tell
from .interrupts import INTERRUPTED
from .streams import keep_descriptors, show_what_can_be_shown

READER_LEFT = 141  # what a shell says of a command that SIGPIPE has ended

COMMANDS = {  # where each is, and what the list says of it: no command waits for another's imports
    "generate": ("generate:generate", "Go on from each PROMPT, or from six beginnings."),
    "chat": ("chat:chat", "Talk with a model in the terminal."),
    "batch": ("batch:batch", "Serve a file of requests; the results are lines of JSON."),
    "serve": ("serve:serve", "Serve a model to clients of OpenAI's API."),
    "inspect": ("inspect_model:inspect", "Say what a model needs, and what fits beside it."),
    "bench": ("bench:bench", "Measure this engine here: throughput, latency, the prefix cache, offload, HTTP, peers."),
    "trace": ("trace:trace", "Say what a trace holds, or convert it for a viewer."),
    "stages": ("stages:stages", "Say which seven stages this engine grew through, and how to run them."),
}


class Commands(click.Group):
    def list_commands(self, context: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        if name not in COMMANDS:
            return None
        module, command = COMMANDS[name][0].split(":")
        return getattr(import_module(f".{module}", __package__), command)

    def format_commands(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, says) for name, (_, says) in COMMANDS.items()])

    def invoke(self, context: click.Context) -> int:
        try:
            return super().invoke(context) or 0
        except KeyboardInterrupt:  # click would print an empty line for it
            tell("interrupted", is_after_key=True)
            raise click.Abort from None


@click.group(cls=Commands, invoke_without_command=True)
@click.version_option(__version__, message="%(prog)s %(version)s")
@click.pass_context
def nanovllm(context: click.Context) -> None:
    """A small LLM engine: continuous batching, shared blocks, a prefix cache, and a second tier on the host."""
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


def run(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status. A mistake is told in one line."""
    keep_descriptors()
    show_what_can_be_shown()
    try:
        status = nanovllm.main(arguments, prog_name="nanovllm", standalone_mode=False) or 0
        if sys.stdout is not None:
            sys.stdout.flush()
        return status
    except click.ClickException as mistake:
        tell(f"error: {mistake.format_message()}")
        return mistake.exit_code
    except click.Abort:
        return INTERRUPTED
    except (BrokenPipeError, SystemExit):  # click makes the one into the other
        sys.stdout = None  # or Python tries the write again when it ends
        return READER_LEFT
    except OSError as error:  # of a write, to a full disk say
        sys.stdout = None
        tell(f"error: {error}")
        return 1
