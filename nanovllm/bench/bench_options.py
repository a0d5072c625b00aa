"""The options of each benchmark: fields and help text for `nanovllm bench`. This module doesn't import torch."""

import math
from dataclasses import dataclass, field
from typing import Any

import click

ABOVE_0 = click.FloatRange(min=0, min_open=True)


def option(default: Any, help: str, **settings: Any) -> Any:
    """Return a field with help text. `settings` may be `choices`, or click's type, multiple, metavar and envvar."""
    return field(default=default, metadata={"help": help, **settings})


def count(default: int | None, help: str) -> Any:
    """Return a field for an integer of at least 1."""
    return option(default, help, type=click.IntRange(min=1))


def rounds(default: int) -> Any:
    """Return a field for the number of rounds."""
    return count(default, "number of rounds; engines take turns, and the report has medians")


def dataset() -> Any:
    """Return a field for a file of requests."""
    lines = 'JSON lines with "prompt", and "output_tokens" to override --output-len'
    return option(None, f"a file of requests to send instead of random ones: {lines}", metavar="FILE")


def whole_numbers(name: str, text: str) -> list[int]:
    """Return a list of numbers separated by commas. Raise ValueError, naming the option, for anything else.

    >>> whole_numbers("--contexts", "1000,8000")
    [1000, 8000]
    """
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise ValueError(f"{name} must be whole numbers of at least 1, separated by commas, got {text!r}")
    return list(map(int, parts))


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Random prompts, all served at the same time."""

    num_prompts: int = count(32, "number of requests")
    input_len: int = count(128, "tokens in each random prompt")
    output_len: int = count(64, "tokens in each output")
    spread: float = option(0.0, "lengths vary by up to this fraction", type=click.FloatRange(0, 1, max_open=True))


@dataclass(frozen=True, kw_only=True)
class Throughput(Workload):
    """Serve all requests at the same time.

    Reports tokens per second, the time to first token, and the time between tokens.
    """

    prompts: str | None = option(None, "a file with one prompt per line, to use instead of random ones", metavar="FILE")
    dataset_path: str | None = dataset()
    rounds: int = rounds(3)


@dataclass(frozen=True, kw_only=True)
class Latency:
    """Serve a few requests on an idle engine, repeatedly."""

    batch_size: str = option("1", "requests at a time; several numbers make a column each", metavar="N,N")
    input_len: int = count(32, "tokens in each random prompt")
    output_len: int = count(64, "tokens in each output")
    rounds: int = rounds(7)


@dataclass(frozen=True, kw_only=True)
class Prefix:
    """Measure how much a cached prefix saves.

    Reports the time to first token of a prompt whose beginning is cached, and of a new one.
    """

    prefix_len: int = count(512, "tokens in the shared prefix")
    input_len: int = count(32, "tokens in each prompt after the prefix")
    output_len: int = count(16, "tokens in each output")
    rounds: int = rounds(7)


@dataclass(frozen=True, kw_only=True)
class Offload(Prefix):
    """Measure how much a prefix in host memory or on disk saves.

    Reports the time to first token with the prefix on the device, on the host, on the disk, or recomputed.
    """


@dataclass(frozen=True, kw_only=True)
class Host:
    """Measure the host's work in a step.

    The device takes no time. Reports the processor time of the engine's thread.
    """

    num_seqs: str = option("64,256", "running sequences; several numbers make a row each", metavar="N,N")
    num_steps: int = count(40, "steps in a round")
    rounds: int = rounds(7)


@dataclass(frozen=True, kw_only=True)
class Http(Workload):
    """Measure the cost of HTTP.

    The engine in this process and a local server take turns serving the same requests, together and one by one.
    """

    rounds: int = rounds(5)


@dataclass(frozen=True, kw_only=True)
class ServerLoad:
    """Measure an OpenAI-compatible server under load.

    Reports requests per second, and the times to the first token, between tokens, and to the end.
    """

    base_url: str = option("http://127.0.0.1:8000", "the server's address")
    model: str | None = option(None, "the model's name; default: the first of the server's /v1/models")
    api_key: str | None = option(None, "the server's API key", envvar="OPENAI_API_KEY")
    endpoint: str = option("completions", "the endpoint to use", choices=("completions", "chat"))
    dataset_path: str | None = dataset()
    num_prompts: int = count(200, "number of requests, unless they come from a file")
    request_rate: float = option(math.inf, "requests per second, as a Poisson process; inf: all at once", type=ABOVE_0)
    max_concurrency: int | None = count(None, "maximum number of requests at a time")
    input_len: int | None = count(None, "words in each prompt; default: lengths typical of chats")
    output_len: int | None = count(None, "tokens in each output; default: lengths typical of chats")
    ignore_eos: bool = option(True, "generate all tokens of an output, even past EOS; not every server supports it")
    seed: int = option(0, "random seed for lengths, words and arrivals")
