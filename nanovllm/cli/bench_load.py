"""Two commands of nanovllm bench: nano-vllm's published workload, and what blocks cost in attention."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import click

from ..checkpoints.shapes import SHAPES
from .bench_options import JSON, PEER, WHOLE, show, size
from .common import located
from .flags import engine_flags, split

SHAPE = "qwen3-0.6b"  # of the published workload
SHAPE_OF_ATTENTION = "llama-3.1-8b"
DTYPES = "float32", "bfloat16", "float16"


def shape_option(help: str, default: str | None = None) -> click.Option:
    names = click.Choice([*SHAPES])
    return click.Option(["--shape"], type=names, default=default, show_default=True, metavar="NAME", help=help)


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
def published(json_file: str | None, shape: str | None, **values: Any) -> int:
    """Serve nano-vllm's published workload.

    256 prompts of 100 to 1,024 random tokens, and as many of each output; beside transformers' generate_batch().
    A sequence may have 4,096 tokens unless --max-model-len says otherwise.
    """
    engine, settings = split(values)

    def measure() -> dict[str, Any]:
        from .benchmarks.published import measure

        with model_of(engine, shape) as (options, name):
            found = measure(options, **settings)
        found["machine"]["model"] = name or found["machine"]["model"]
        return found

    show(measure, json_file)
    return 0


@contextmanager
def model_of(engine: dict[str, Any], shape: str | None) -> Iterator[tuple[dict[str, Any], str | None]]:
    """The engine's options with a folder as model, and what it is called if it is no checkpoint."""
    if engine["model"] is not None:
        if shape is not None:
            raise ValueError(f"--shape {shape} and --model {engine['model']}: give one of them")
        yield located(engine), None
        return
    from .benchmarks.shapes import folder_of_shape

    folder = folder_of_shape(shape or SHAPE)
    dummy = {"model": str(folder), "load_format": "dummy", "skip_tokenizer_init": True}
    yield {name: value for name, value in engine.items() if name != "revision"} | dummy, f"random {shape or SHAPE}"


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
