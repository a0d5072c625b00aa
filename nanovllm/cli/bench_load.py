"""Commands of nanovllm bench for a GPU's questions: a published workload, what blocks cost, what a step starts."""

from typing import Any

import click

from .bench_options import JSON, PEER, WHOLE, run, shape_option, shared, show, size
from .flags import engine_flags

SHAPE = "qwen3-0.6b"  # of the published workload
SHAPE_OF_ATTENTION = "llama-3.1-8b"
DTYPES = "float32", "bfloat16", "float16"

PUBLISHED: list[click.Parameter] = [
    shape_option(f"a published shape, with random weights; default: {SHAPE}, unless --model names a checkpoint"),
    size("--num-requests", 256, "requests, all at once"),
    size("--min-len", 100, "fewest tokens of a prompt, and of an output"),
    size("--max-len", 1024, "most tokens of a prompt, and of an output"),
    click.Option(["--temperature"], type=click.FloatRange(min=0), default=0.6, show_default=True, help="of sampling"),
    PEER,
    click.Option(
        ["--peer-seconds"],
        type=click.FloatRange(min=0, min_open=True),
        default=240.0,
        show_default=True,
        help="then transformers is stopped: its speed is that of the tokens that it has made",
    ),
    JSON,
    *engine_flags(model=None, max_num_seqs=256, max_num_batched_tokens=16384),
]


@click.command(params=PUBLISHED)
def published(**values: Any) -> int:
    """Serve nano-vllm's published workload.

    256 prompts of 100 to 1,024 random tokens, and as many of each output; beside transformers' generate_batch().
    A sequence may have 4,096 tokens unless --max-model-len says otherwise.
    """
    return run("published", values, default_shape=SHAPE)


NUMBERS = "N,N"
PAGED: list[click.Parameter] = [
    shape_option("heads and layers are those of this published shape", SHAPE_OF_ATTENTION),
    click.Option(["--batch-sizes"], default="1,8,64", show_default=True, metavar=NUMBERS, help="sequences"),
    click.Option(["--contexts"], default="1024,8192,32768", show_default=True, metavar=NUMBERS, help="their tokens"),
    click.Option(["--block-sizes"], default="16,128", show_default=True, metavar=NUMBERS, help="slots in a block"),
    click.Option(
        ["--layers"], type=WHOLE, help="default: the shape's; more if caches would hold them, fewer if memory lacks"
    ),
    click.Option(["--device"], help="default: the GPU where there is one"),
    click.Option(["--dtype"], type=click.Choice(DTYPES), help="default: bfloat16; on a CPU float32"),
    size("--rounds", 15, "rounds; what is compared takes turns, and medians are told"),
    JSON,
]


@click.command(params=PAGED)
def paged(json_file: str | None, **values: Any) -> int:
    """Measure what blocks cost in attention.

    A decode step's attention over a paged cache, over a contiguous one, and torch's own.
    """

    def measure() -> dict[str, Any]:
        from .benchmarks.paged import measure

        return measure(**values)

    show(measure, json_file)
    return 0


LAUNCHES: list[click.Parameter] = [
    shape_option("a published shape, with random weights, in place of --model"),
    size("--batch-size", 1, "sequences that decode"),
    size("--input-len", 128, "tokens of each before"),
    *shared(rounds=20, peer=None, model=None),
]


@click.command(params=LAUNCHES)
def launches(**values: Any) -> int:
    """Count what a decode step starts.

    Kernels, graphs, copies and waits of a step by plain operations, by kernels, and by CUDA graphs of them.
    """
    return run("launches", values)
