"""nanovllm batch: a file of requests in, and for each a line of JSON out as soon as it has ended."""

import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from threading import Event
from typing import IO, Any

import click
from tqdm import tqdm

from ..api import LLM, LLMEngine, RequestOutput, SamplingParams
from ..core.stories import pool_line
from .common import engine_flags, find_checkpoint, one_line_errors, sampling_flags, split
from .interrupts import ctrl_c_noted
from .requests_file import Request, read_requests
from .results import result_line, write_whole
from .streams import read_file, standard_input, standard_output, unbuffered
from .tracing import Tracing, trace_option


@click.command(params=sampling_flags() + engine_flags())
@click.argument("file")
@click.option("--logprobs", type=int, help="of each token, how many of the likeliest in its place are told")
@click.option("--prompt-logprobs", type=int, help="the same for the tokens of the prompt")
@click.option("--output", metavar="PATH", default="-", help="where the results go; default: standard output")
@click.option("--overwrite", is_flag=True, help="replace the file of results if there is one")
@trace_option
def batch(file: str, output: str, overwrite: bool, trace: str | None, **values: Any) -> int:
    """Serve a file of requests; the results are lines of JSON.

    FILE is {"requests": [{"prompt": "Once upon a time", "max_tokens": 64}, ...]}, or such requests one a line; - is
    standard input. They may have an "id" and any field of SamplingParams; options are for those that do not say. A
    result is written as soon as its request has ended.

    Exit status 1: a request could not be served, and its result says why. 2: nothing was done.
    """
    engine, sampling = split(values)
    with one_line_errors():
        SamplingParams(**sampling)
        requests = load_requests(file, sampling)
        check_output(output, file, overwrite)
        find_checkpoint(engine["model"])
        tracing = Tracing(trace)
        if trace is not None and Path(trace).resolve() == Path(output).resolve():
            raise ValueError(f"{trace} is where the results go: the trace needs another file")
        llm = LLM(**engine)
        target = open_output(output, overwrite)
    with target as stream, tracing.of(llm):
        status = serve(llm, requests, stream)
    return 1 if tracing.failed else status


def load_requests(file: str, defaults: dict[str, Any]) -> list[Request]:
    """Raises ValueError, naming the file, if one of its requests is wrong; OSError if it cannot be read."""
    if file == "-":
        standard_input()  # it may be closed
    try:
        return read_requests(read_file(file), defaults)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file}: {error}") from None


def check_output(output: str, file: str, overwrite: bool) -> None:
    """Raises ValueError, before anything is computed, if it could not be kept or would replace what is there."""
    path = Path(output)
    if output == "-":
        standard_output()
        return
    if path.exists() and not overwrite:
        raise ValueError(f"{output} is there already: --overwrite would replace it")
    if path.exists() and file != "-" and path.samefile(file):
        raise ValueError(f"{output} is the file of requests: results need another")
    if not path.parent.is_dir():
        raise ValueError(f"there is no folder {path.parent} to write {path.name} to")


def open_output(output: str, overwrite: bool) -> AbstractContextManager[IO[bytes]]:
    """The file without a buffer: after write_whole(), a line is in it or is not."""
    if output == "-":
        return nullcontext(unbuffered(standard_output()))
    return open(output, "wb" if overwrite else "xb", buffering=0)


def serve(llm: LLM, requests: list[Request], stream: IO[bytes]) -> int:
    """Write a result for each request; returns the exit status."""
    by_id = {request.id: request for request in requests}
    num_written = num_failed = num_tokens = 0
    start = time.perf_counter()
    is_seen = sys.stderr is not None and sys.stderr.isatty()
    progress = tqdm(total=len(requests), unit=" requests", miniters=0, disable=not is_seen)
    with ctrl_c_noted() as interrupted, progress as bar:
        for output in outputs_of(llm.llm_engine, requests, interrupted):
            if output.finished:
                with bar.external_write_mode(sys.stdout):  # the bar steps aside
                    write_whole(stream, result_line(by_id[output.request_id], output))
                num_written += 1
                num_failed += output.error is not None
                num_tokens += sum(len(completion.token_ids) for completion in output.outputs)
            bar.update(output.finished)
    if interrupted.is_set():
        click.echo(f"interrupted: {num_written} of {len(requests)} requests have their results", err=True)
        raise click.Abort
    speed = f"{num_tokens:,} tokens, {num_tokens / (time.perf_counter() - start):.0f} tokens/s"
    click.echo(f"{num_written} requests, {num_failed} failed, {speed}, {pool_line(llm.peak)}", err=True)
    return 1 if num_failed else 0


def outputs_of(engine: LLMEngine, requests: list[Request], interrupted: Event) -> Iterator[RequestOutput]:
    """A request's output so far whenever it got a token; of one that cannot be served, the error."""
    for request in requests:
        try:
            engine.add_request(request.id, request.prompt, request.params)
        except ValueError as error:
            yield RequestOutput.failed(request.id, request.prompt, str(error))
    while engine.has_unfinished_requests() and not interrupted.is_set():
        yield from map(RequestOutput.of, engine.step())
