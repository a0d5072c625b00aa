"""The options of each benchmark: fields and help texts for `nanovllm bench`, without importing torch."""

import math
from dataclasses import dataclass, field
from typing import Any

import click

ABOVE_0 = click.FloatRange(min=0, min_open=True)


def option(default: Any, help: str, **more: Any) -> Any:
    """Return a field with its help. `more` has its choices, or settings of click: type, multiple, metavar, envvar."""
    return field(default=default, metadata={"help": help, **more})


def count(default: int | None, help: str) -> Any:
    """Return a field that must be at least 1."""
    return option(default, help, type=click.IntRange(min=1))


def rounds(default: int) -> Any:
    """Return the number of rounds."""
    return count(default, "rounds; engines take turns, and the report has medians")


def dataset() -> Any:
    """Return the option to read requests from a file."""
    lines = 'JSON lines with "prompt", and "output_tokens" if --output-len does not apply'
    return option(None, f"a file of requests instead of random ones: {lines}", metavar="FILE")


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Random prompts, all served at the same time."""

    num_prompts: int = count(32, "requests")
    input_len: int = count(128, "tokens in each random prompt")
    output_len: int = count(64, "tokens in each output")
    spread: float = option(0.0, "random lengths vary by up to this share", type=click.FloatRange(0, 1, max_open=True))


@dataclass(frozen=True, kw_only=True)
class Throughput(Workload):
    """Serve all requests at once.

    Reports tokens per second, the time to first token, and the time between tokens.
    """

    prompts: str | None = option(None, "a file with a prompt per line, instead of random ones", metavar="FILE")
    dataset_path: str | None = dataset()
    rounds: int = rounds(3)


@dataclass(frozen=True, kw_only=True)
class Latency:
    """Serve a few requests on an idle engine, again and again."""

    batch_size: int = count(1, "requests at a time")
    input_len: int = count(32, "tokens in each random prompt")
    output_len: int = count(64, "tokens in each output")
    rounds: int = rounds(7)


@dataclass(frozen=True, kw_only=True)
class Prefix:
    """Measure the gain of a cached prefix.

    Reports the time to first token of a prompt whose beginning is cached, and of a new one.
    """

    prefix_len: int = count(512, "tokens in the shared prefix")
    input_len: int = count(32, "tokens in each prompt after the prefix")
    output_len: int = count(16, "tokens in each output")
    rounds: int = rounds(7)


@dataclass(frozen=True, kw_only=True)
class Offload(Prefix):
    """Measure the gain of a prefix in host memory.

    Reports the time to first token with the prefix on the device, on the host, or computed again.
    """


@dataclass(frozen=True, kw_only=True)
class Http(Workload):
    """Measure the cost of HTTP.

    The engine in this process and a local server take turns with the same requests: all at once, and one at a time.
    """

    rounds: int = rounds(5)


@dataclass(frozen=True, kw_only=True)
class ServerLoad:
    """Measure an OpenAI-compatible server under load.

    Works with any such server. Reports requests per second, the time to first token, between tokens, and to the end.
    """

    base_url: str = option("http://127.0.0.1:8000", "the server's address")
    model: str | None = option(None, "the model's name; default: the first of the server's /v1/models")
    api_key: str | None = option(None, "the server's API key", envvar="OPENAI_API_KEY")
    endpoint: str = option("completions", "the endpoint to use", choices=("completions", "chat"))
    dataset_path: str | None = dataset()
    num_prompts: int = count(200, "requests, unless a file has them")
    request_rate: float = option(math.inf, "requests per second, as a Poisson process; inf: all at once", type=ABOVE_0)
    max_concurrency: int | None = count(None, "most requests at a time")
    input_len: int | None = count(None, "words of each prompt; default: lengths typical of chats")
    output_len: int | None = count(None, "tokens of each output; default: lengths typical of chats")
    ignore_eos: bool = option(True, "generate all tokens of an output; not every server supports it")
    seed: int = option(0, "seed of lengths, words and arrivals")
