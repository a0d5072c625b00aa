"""nanovllm bench: how fast the engine is here, beside transformers where it is installed."""

from typing import Any

import click

from .bench_load import paged, published
from .bench_options import WHOLE, run, shared, show, size


@click.group(invoke_without_command=True)
@click.pass_context
def bench(context: click.Context) -> None:
    """Measure this engine here: throughput, latency, the prefix cache, offload, HTTP, peers."""
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


bench.add_command(published)
bench.add_command(paged)


TOGETHER: list[click.Parameter] = [
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
]
THROUGHPUT: list[click.Parameter] = [
    *TOGETHER,
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


@bench.command(params=TOGETHER + shared(rounds=5, peer=None))
def http(**values: Any) -> int:
    """Measure what HTTP costs.

    The engine itself and a server of its own serve the same requests in turns: all at once, and one at a time.
    """
    return run("through_http", values)


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


SERVE: list[click.Parameter] = [
    click.Option(["--base-url"], default="http://127.0.0.1:8000", show_default=True, help="the server's address"),
    click.Option(["--model"], help="what the server calls the model; default: the first of its /v1/models"),
    click.Option(["--api-key"], envvar="OPENAI_API_KEY", help="its key; or in OPENAI_API_KEY"),
    click.Option(
        ["--endpoint"],
        type=click.Choice(["completions", "chat"]),
        default="completions",
        show_default=True,
        help="which interface",
    ),
    size("--num-prompts", 200, "requests"),
    click.Option(
        ["--request-rate"],
        type=click.FloatRange(min=0, min_open=True),
        default=float("inf"),
        show_default=True,
        help="requests a second, which come as of a Poisson process; inf: all at once",
    ),
    click.Option(["--max-concurrency"], type=WHOLE, help="most requests at a time"),
    click.Option(["--input-len"], type=WHOLE, help="words of each prompt; default: lengths as of chats"),
    click.Option(["--output-len"], type=WHOLE, help="tokens of each output; default: lengths as of chats"),
    click.Option(
        ["--ignore-eos/--no-ignore-eos"],
        default=True,
        show_default=True,
        help="outputs have the length that was drawn; not all servers know that field",
    ),
    click.Option(["--seed"], type=int, default=0, show_default=True, help="of lengths, words and arrivals"),
    click.Option(["--json", "json_file"], metavar="PATH", help="write all numbers as JSON; - is standard output"),
]


@bench.command(params=SERVE)
def serve(json_file: str | None, **values: Any) -> int:
    """Load a server that speaks OpenAI's interface.

    This one, or any other. Requests a second, the time to the first token, between tokens, and to the end.
    """

    def measure() -> dict[str, Any]:
        from .benchmarks.serve import measure_server

        return measure_server(**values)

    found = show(measure, json_file)
    return 1 if found["measured"]["server"]["failed"] else 0
