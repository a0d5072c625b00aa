"""The program `nanovllm`: its list of commands, its exit statuses, and its errors, each printed as one line."""

import sys
from collections.abc import Sequence
from importlib import import_module

import click

from .. import __version__
from ..log import tell
from .terminal import INTERRUPTED_STATUS, open_closed_streams, replace_unprintable, tell_interrupted

BROKEN_PIPE_STATUS = 141  # a shell's exit status for a command that SIGPIPE has ended

# For each command: its module and attribute, and its line in --help. A command is imported only when it runs.
COMMANDS = {
    "generate": ("generate:generate", "Continue each PROMPT, or six built-in ones."),
    "chat": ("chat:chat", "Chat with a model in the terminal."),
    "batch": ("batch:batch", "Serve a file of requests, and write the results as lines of JSON."),
    "serve": ("serve:serve", "Serve a model over an OpenAI-compatible API."),
    "inspect": ("inspect:inspect", "Calculate how much memory a model needs, and how many sequences fit in the rest."),
    "bench": (
        "bench:bench",
        "Measure this engine (throughput, latency, prefixes, offload, the host, HTTP), and any server under load.",
    ),
    "trace": ("trace:trace", "Summarize a trace, or convert it for a viewer."),
    "stages": ("stages:stages", "List the seven stages that this engine grew through, and how to run them."),
}


class CommandGroup(click.Group):
    """The group of all commands, each of which is imported only when it runs."""

    def list_commands(self, context: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        if name not in COMMANDS:
            return None
        module, attribute = COMMANDS[name][0].split(":")
        command: click.Command = getattr(import_module(f".{module}", __package__), attribute)
        return command

    def format_commands(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, line) for name, (_, line) in COMMANDS.items()])

    def invoke(self, context: click.Context) -> int:
        try:
            return super().invoke(context) or 0
        except KeyboardInterrupt:  # click would print an empty line
            tell_interrupted()
            raise click.Abort from None


@click.group(cls=CommandGroup, invoke_without_command=True)
@click.version_option(__version__, message="%(prog)s %(version)s")
@click.pass_context
def nanovllm(context: click.Context) -> None:
    """Run a small LLM engine: continuous batching, a paged KV cache, prefix caching, and offload to host memory."""
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


def run(arguments: Sequence[str] | None = None, program: click.Command = nanovllm) -> int:
    """Run a command of `program`, and return its exit status. By default, the arguments are those of this process."""
    open_closed_streams()
    replace_unprintable()
    try:
        status: int = program.main(arguments, prog_name=program.name, standalone_mode=False) or 0
        if sys.stdout is not None:
            sys.stdout.flush()
        return status
    except click.ClickException as error:
        tell(f"error: {error.format_message()}")
        return error.exit_code
    except click.Abort:
        return INTERRUPTED_STATUS
    except (BrokenPipeError, SystemExit):  # click turns a BrokenPipeError into SystemExit
        sys.stdout = None  # otherwise, Python retries the write at exit
        return BROKEN_PIPE_STATUS
    except OSError as error:  # a write to a full disk, for example
        sys.stdout = None
        tell(f"error: {error}")
        return 1
