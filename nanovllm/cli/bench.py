"""nanovllm bench: how fast the engine is here, beside transformers where it is installed."""

from typing import Any

import click

from .common import located, one_line_errors
from .flags import engine_flags, split
from .streams import standard_output

WHOLE = click.IntRange(min=1)


def size(name: str, default: int, help: str) -> click.Option:
    return click.Option([name], type=WHOLE, default=default, show_default=True, help=help)


PEER = click.Option(["--peer/--no-peer"], default=True, show_default=True, help="measure transformers too")


def shared(rounds: int, peer: click.Option = PEER) -> list[click.Parameter]:
    """The options of every benchmark."""
    return [
        size("--rounds", rounds, "rounds; what is compared takes turns, and medians are told"),
        peer,
        click.Option(["--json", "json_file"], metavar="PATH", help="write all numbers as JSON; - is standard output"),
        *engine_flags(),
    ]


@click.group(invoke_without_command=True)
@click.pass_context
def bench(context: click.Context) -> None:
    """Measure this engine here: throughput, latency, the prefix cache, offload, peers."""
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


THROUGHPUT: list[click.Parameter] = [
    size("--num-prompts", 32, "requests"),
    size("--input-len", 128, "tokens of a random prompt"),
    size("--output-len", 64, "tokens of an output"),
    click.Option(
        ["--spread"],
        type=click.FloatRange(0, 1, max_open=True),
        default=0.0,
        show_default=True,
        help="random lengths are up to this share shorter or longer",
    ),
    click.Option(["--prompts", "prompts_file"], metavar="FILE", help="prompts, one a line, in place of random ones"),
]


@bench.command(params=THROUGHPUT + shared(rounds=3))
def throughput(**values: Any) -> int:
    """Serve all requests at once: how fast, and how soon.

    Tokens a second, the time to the first token, and between tokens.
    """
    return run("throughput", values)


LATENCY: list[click.Parameter] = [
    size("--batch-size", 1, "requests at a time"),
    size("--input-len", 32, "tokens of a random prompt"),
    size("--output-len", 64, "tokens of an output"),
]


@bench.command(params=LATENCY + shared(rounds=7))
def latency(**values: Any) -> int:
    """Serve a few requests on an idle engine, again and again."""
    return run("latency", values)


PREFIX: list[click.Parameter] = [
    size("--prefix-len", 512, "tokens with which all prompts begin"),
    size("--input-len", 32, "tokens of a prompt behind them"),
    size("--output-len", 16, "tokens of an output"),
]


@bench.command(params=PREFIX + shared(rounds=7))
def prefix(**values: Any) -> int:
    """Measure what a cached beginning saves.

    The time to the first token of a prompt whose beginning is cached, and of one that is new.
    """
    return run("prefix", values)


@bench.command(params=PREFIX + shared(rounds=7))
def offload(**values: Any) -> int:
    """Measure what a beginning on the host saves.

    The time to the first token with the beginning on the device, on the host, or computed again.
    """
    return run("offload", values)


PEERS: list[click.Parameter] = [
    click.Option(
        ["--transformers/--no-transformers"],
        default=True,
        show_default=True,
        help="measure transformers too, where it is installed",
    ),
    click.Option(
        ["--jobs"],
        default="mixed,1,2,4",
        show_default=True,
        help="mixed: 32 requests of all lengths; a number: that many sequences decode",
    ),
    click.Option(["--contexts"], default="", metavar="N,N", help="lengths at which decode steps are measured too"),
    size("--context-batch", 8, "sequences of such a length in a step"),
]
NAMED_PEER = click.Option(
    ["--peer"],
    multiple=True,
    metavar="NAME=PYTHON[,FILE]",
    help="vllm=PYTHON or llama.cpp=PYTHON,FILE.gguf: an interpreter that has it; may be given several times",
)


@bench.command(params=PEERS + shared(rounds=3, peer=NAMED_PEER))
def peers(**values: Any) -> int:
    """Race vLLM, llama.cpp and transformers.

    All serve the same requests in turn, each in a process of its own; tokens are compared.
    """
    return run("peers", values)


def run(name: str, values: dict[str, Any]) -> int:
    """Measure, print a table, and write JSON if that is asked for."""
    json_file = values.pop("json_file")
    engine, settings = split(values)
    with one_line_errors():
        standard_output()
        if json_file not in (None, "-"):
            open(json_file, "a").close()  # that it cannot be written is told now

    from .benchmarks import measure, table, write_json

    with one_line_errors():
        found = measure(name, located(engine), **settings)
    if json_file:
        write_json(found, json_file)
    click.echo(table(found), err=json_file == "-")
    return 0
