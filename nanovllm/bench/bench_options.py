"""The options of each benchmark: fields and help texts for `nanovllm bench`, without importing torch."""

import math
from dataclasses import dataclass, field
from typing import Any

import click

from ..checkpoints.sizes import SHAPES

PEER = "vllm=PYTHON or llama.cpp:LABEL=PYTHON,FILE.gguf: an interpreter that can import it; repeatable"
JOBS = "mixed: 32 requests of mixed lengths; a number: that many decoding sequences"
DTYPES = ("float32", "bfloat16", "float16")
PUBLISHED_SHAPE = "qwen3-0.6b"
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


def peer() -> Any:
    """Return the option to measure transformers too."""
    return option(True, "measure transformers too")


def dataset() -> Any:
    """Return the option to read requests from a file."""
    lines = 'JSON lines with "prompt", and "output_tokens" if --output-len does not apply'
    return option(None, f"a file of requests instead of random ones: {lines}", metavar="FILE")


def shape(more: str = "") -> Any:
    """Return the option to measure random weights."""
    help = f"a published shape, with random weights, instead of --model{more}"
    return option(None, help, choices=(*SHAPES,), metavar="NAME")


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
    peer: bool = peer()


@dataclass(frozen=True, kw_only=True)
class Latency:
    """Serve a few requests on an idle engine, again and again."""

    batch_size: int = count(1, "requests at a time")
    input_len: int = count(32, "tokens in each random prompt")
    output_len: int = count(64, "tokens in each output")
    rounds: int = rounds(7)
    peer: bool = peer()


@dataclass(frozen=True, kw_only=True)
class Prefix:
    """Measure the gain of a cached prefix.

    Reports the time to first token of a prompt whose beginning is cached, and of a new one.
    """

    prefix_len: int = count(512, "tokens in the shared prefix")
    input_len: int = count(32, "tokens in each prompt after the prefix")
    output_len: int = count(16, "tokens in each output")
    rounds: int = rounds(7)
    peer: bool = peer()


@dataclass(frozen=True, kw_only=True)
class Offload(Prefix):
    """Measure the gain of a prefix in host memory.

    Reports the time to first token with the prefix on the device, on the host, or computed again.
    """


@dataclass(frozen=True, kw_only=True)
class Speculation:
    """Measure the gain of speculation.

    Edits are forced: each output is its prompt, with a change every --edit-every tokens, whatever the model says. A
    checkpoint also writes stories, and goes on with a story that it has just written.
    """

    shape: str | None = shape()
    batch_sizes: str = option("1,4", "requests at a time", metavar="N,N")
    output_len: int = count(200, "tokens in each output, and in the prompt of an edit")
    edit_every: int = count(25, "tokens from one change of an edit to the next")
    temperature: float = option(0.7, "sampling temperature of stories", type=click.FloatRange(min=0))
    rounds: int = rounds(5)


@dataclass(frozen=True, kw_only=True)
class Http(Workload):
    """Measure the cost of HTTP.

    The engine in this process and a local server take turns with the same requests: all at once, and one at a time.
    """

    rounds: int = rounds(5)


@dataclass(frozen=True, kw_only=True)
class Peers:
    """Race vLLM, llama.cpp and transformers.

    All engines take turns with the same requests, each in its own process, and their tokens are compared.
    """

    shape: str | None = shape("; vllm and llama.cpp cannot take one")
    peer: tuple[str, ...] = option((), PEER, metavar="NAME[:LABEL]=PYTHON[,FILE]", multiple=True)
    transformers: bool = option(True, "measure transformers too, if it is installed")
    formats: str = option("", "measure this engine with quantized weights too: int8, int4 or both", metavar="NAME,NAME")
    jobs: str = option("mixed,1,2,4", JOBS)
    prompts: str = option("", "lengths of prompts whose first token is timed", metavar="N,N")
    busy_jobs: str = option("", "more jobs, beside another process that computes all the time", metavar="JOB,JOB")
    contexts: str = option("", "context lengths at which to measure decode steps too", metavar="N,N")
    context_batch: int = count(8, "sequences in a decode step at those lengths")
    rounds: int = rounds(3)


@dataclass(frozen=True, kw_only=True)
class Published:
    """Serve nano-vllm's published workload.

    256 requests, each with 100 to 1,024 random prompt tokens and as many output tokens; then the same with
    transformers' generate_batch(). The default of --max-model-len is 4096.
    """

    shape: str | None = shape(f"; default: {PUBLISHED_SHAPE}, unless --model names a checkpoint")
    num_requests: int = count(256, "requests, all at once")
    min_len: int = count(100, "fewest tokens in a prompt and in an output")
    max_len: int = count(1024, "most tokens in a prompt and in an output")
    temperature: float = option(0.6, "sampling temperature", type=click.FloatRange(min=0))
    peer: bool = peer()
    peer_seconds: float = option(
        240.0, "stop transformers after this many seconds; its speed counts the tokens generated so far", type=ABOVE_0
    )


@dataclass(frozen=True, kw_only=True)
class Launches:
    """Count what a decode step launches.

    Counts kernels, graphs, copies and waits of a step with plain operations, with kernels, and with CUDA graphs.
    """

    shape: str | None = shape()
    batch_size: int = count(1, "sequences that decode")
    input_len: int = count(128, "tokens of each sequence's prompt")
    rounds: int = rounds(20)


@dataclass(frozen=True, kw_only=True)
class Paged:
    """Measure the cost of paging in attention.

    Times a decode step's attention over a paged cache, over a contiguous one, and by torch.
    """

    shape: str = option("llama-3.1-8b", "a published shape: its heads and layers", choices=(*SHAPES,), metavar="NAME")
    batch_sizes: str = option("1,8,64", "sequences", metavar="N,N")
    contexts: str = option("1024,8192,32768", "tokens of each sequence", metavar="N,N")
    block_sizes: str = option("16,128", "slots in a block", metavar="N,N")
    layers: int | None = count(None, "default: the shape's; more if caches would hold them, fewer if memory is short")
    device: str | None = option(None, "default: the GPU if there is one")
    dtype: str | None = option(None, "default: bfloat16 on a GPU, float32 on a CPU", choices=DTYPES)
    rounds: int = rounds(15)


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


@dataclass(frozen=True, kw_only=True)
class Routing:
    """Simulate many engines behind a router.

    Measures the cost of a step on this machine, and then runs the real scheduler and block manager of N engines without
    a model, in virtual time. Compares round robin, least queue and prefix-aware routing: the share of prompt tokens
    that are cached, the time to first token, and memory, as N and the requests grow together.
    """

    engines: str = option("1,2,4,8,16,32,64", "numbers of engines", metavar="N,N")
    num_requests: int = count(48, "requests for each engine")
    num_prefixes: int = count(8, "shared prefixes for each engine; the k-th most popular one has weight 1/k")
    prefix_len: int = count(256, "tokens in a shared prefix")
    input_len: int = count(32, "tokens in each prompt after the prefix")
    output_len: int = count(32, "tokens in each output")
    spread: float = option(0.5, "lengths vary by up to this share", type=click.FloatRange(0, 1, max_open=True))
    load: float = option(
        0.7,
        "requests per second, as a Poisson process, in shares of what an engine serves without a cache",
        type=ABOVE_0,
    )


def whole_numbers(name: str, text: str) -> list[int]:
    """Return a list of numbers separated by commas. Raise ValueError, naming the option, for anything else.

    >>> whole_numbers("--contexts", "1000,8000")
    [1000, 8000]
    """
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise ValueError(f"{name} must be whole numbers of at least 1, separated by commas, got {text!r}")
    return list(map(int, parts))
