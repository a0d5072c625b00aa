"""nanovllm batch: a file of requests in, and for each a line of JSON out as soon as it has ended."""

from pathlib import Path
from typing import Any, NamedTuple

import click
from click.core import ParameterSource

from .common import one_line_errors
from .flags import engine_flags, sampling_flags, split, stats_flag
from .results_file import check_output
from .tracing import trace_option


class BatchOptions(NamedTuple):
    """What is neither the engine's nor of SamplingParams."""

    file: str
    output: str
    overwrite: bool
    resume: bool
    chat_template: str | None
    stats: float | None
    trace: str | None


@click.command(params=sampling_flags() + engine_flags() + [stats_flag()])
@click.argument("file")
@click.option("--logprobs", type=int, help="of each token, how many of the likeliest in its place are told")
@click.option("--prompt-logprobs", type=int, help="the same for the tokens of the prompt")
@click.option("--output", metavar="PATH", default="-", help="where the results go; default: standard output")
@click.option("--overwrite", is_flag=True, help="replace the file of results if there is one")
@click.option("--chat-template", metavar="PATH", help="a file with the template of chats, or the word plain")
@click.option("--resume", is_flag=True, help="go on in the file of results: what it holds is not served again")
@trace_option
@click.pass_context
def batch(context: click.Context, **values: Any) -> int:
    """Serve a file of requests; the results are lines of JSON.

    FILE is {"requests": [{"prompt": "Once upon a time", "max_tokens": 64}, ...]}, or such requests one a line, or lines
    of OpenAI's batches; - is standard input. Requests may have an "id" and any field of SamplingParams; options are for
    those that do not say. A result is written as soon as its request has ended.

    Exit status 1: a request could not be served, and its result says why. 2: nothing was done.
    """
    options = BatchOptions(**{name: values.pop(name) for name in BatchOptions._fields})
    engine, sampling = split(values)
    given = {name: sampling[name] for name in sampling if is_given(context, name)}
    with one_line_errors():
        check_options(options)

    from .batch_run import run_batch

    return run_batch(options, engine, given)


def is_given(context: click.Context, name: str) -> bool:
    """Whether the command line says it: what a request leaves out may have another default than the option."""
    return context.get_parameter_source(name) != ParameterSource.DEFAULT


def check_options(options: BatchOptions) -> None:
    """Raises ValueError for files that cannot be what they should be."""
    check_output(options.output, options.file, options.overwrite, options.resume)
    if options.trace is not None and Path(options.trace).resolve() == Path(options.output).resolve():
        raise ValueError(f"{options.trace} is where the results go: the trace needs another file")
