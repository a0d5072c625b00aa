"""The options of the benchmarks of `python -m stages.bench`, without importing torch."""

from dataclasses import dataclass
from typing import Any

import click

from nanovllm.bench.bench_options import ABOVE_0, count, option, rounds
from nanovllm.checkpoints.sizes import SHAPES

PEER = "vllm=PYTHON or llama.cpp:LABEL=PYTHON,FILE.gguf: an interpreter that can import it; repeatable"
JOBS = "mixed: 32 requests of mixed lengths; a number: that many decoding sequences"
DTYPES = ("float32", "bfloat16", "float16")
PUBLISHED_SHAPE = "qwen3-0.6b"


def shape(more: str = "") -> Any:
    """Return the option to measure random weights."""
    help = f"a published shape, with random weights, instead of --model{more}"
    return option(None, help, choices=(*SHAPES,), metavar="NAME")


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
class Peers:
    """Race vLLM, llama.cpp and transformers.

    All engines take turns with the same requests, each in its own process, and their tokens are compared.
    """

    shape: str | None = shape("; vllm and llama.cpp cannot take one")
    peer: tuple[str, ...] = option((), PEER, metavar="NAME[:LABEL]=PYTHON[,FILE]", multiple=True)
    transformers: bool = option(True, "measure transformers too, if it is installed")
    formats: str = option("", "measure this engine with quantized weights too: int8, int4 or both", metavar="NAME,NAME")
    jobs: str = option("mixed,1,2,4", JOBS)
    written: bool = option(False, "written questions in the model's chat template, instead of random tokens")
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
    peer: bool = option(True, "measure transformers too")
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
