"""nanovllm batch: a file of requests in, and for each a line of JSON out as soon as it has ended."""

import signal
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from threading import Event
from typing import IO, Any

import click
from tqdm import tqdm

from .cli import engine_flags, find_checkpoint, sampling_flags, split, told_in_one_line
from .engine import LLMEngine
from .llm import LLM
from .outputs import RequestOutput
from .requests_file import Request, read_requests
from .results import result_line
from .sampling import SamplingParams
from .stories import pool_line


@click.command(params=sampling_flags() + engine_flags())
@click.argument("file")
@click.option("--logprobs", type=int, help="of each token, how many of the likeliest in its place are told")
@click.option("--prompt-logprobs", type=int, help="the same for the tokens of the prompt")
@click.option("--output", metavar="PATH", default="-", help="where the results go; default: standard output")
@click.option("--overwrite", is_flag=True, help="replace the file of results if there is one")
def batch(file: str, output: str, overwrite: bool, **values: Any) -> int:
    """Serve a file of requests; the results are lines of JSON.

    FILE is {"requests": [{"prompt": "Once upon a time", "max_tokens": 64}, ...]}, or such requests one a line; - is
    standard input. They may have an "id" and any field of SamplingParams; options are for those that do not say. A
    result is written as soon as its request has ended.

    Exit status 1: a request could not be served, and its result says why. 2: nothing was done.
    """
    engine, sampling = split(values)
    with told_in_one_line():
        SamplingParams(**sampling)
        requests = load_requests(file, sampling)
        check_output(output, file, overwrite)
        find_checkpoint(engine["model"])
        llm = LLM(**engine)
        target = open_output(output, overwrite)
    with target as stream:
        return serve(llm, requests, stream)


def load_requests(file: str, defaults: dict[str, Any]) -> list[Request]:
    """Raises ValueError, naming the file, if one of its requests is wrong; OSError if it cannot be read."""
    with click.open_file(file, encoding="utf-8-sig") as stream:
        try:
            return read_requests(stream.read(), defaults)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{file}: {error}") from None


def check_output(output: str, file: str, overwrite: bool) -> None:
    """Raises ValueError, before anything is computed, if it could not be kept or would replace what is there."""
    path = Path(output)
    if output == "-":
        return
    if path.exists() and not overwrite:
        raise ValueError(f"{output} is there already: --overwrite would replace it")
    if path.exists() and file != "-" and path.samefile(file):
        raise ValueError(f"{output} is the file of requests: results need another")
    if not path.parent.is_dir():
        raise ValueError(f"there is no folder {path.parent} to write {path.name} to")


def open_output(output: str, overwrite: bool) -> AbstractContextManager[IO[str]]:
    if output == "-":
        return nullcontext(sys.stdout)
    return click.open_file(output, "w" if overwrite else "x", encoding="utf-8")


def serve(llm: LLM, requests: list[Request], stream: IO[str]) -> int:
    """Write a result for each request; returns the exit status."""
    by_id = {request.id: request for request in requests}
    num_written = num_failed = num_tokens = 0
    start = time.perf_counter()
    progress = tqdm(total=len(requests), unit=" requests", miniters=0, disable=None)  # None: off if no terminal
    with ctrl_c_noted() as interrupted, progress as bar:
        for output in outputs_of(llm.llm_engine, requests, interrupted):
            if output.finished:
                with bar.external_write_mode(stream):  # the bar steps aside
                    stream.write(result_line(by_id[output.request_id], output))
                    stream.flush()
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
        yield from engine.step()


@contextmanager
def ctrl_c_noted() -> Iterator[Event]:
    """Ctrl-C sets the event: what a step has ended is written, and no line is cut. The second is as ever."""

    def note(*_: Any) -> None:
        interrupted.set()
        signal.signal(signal.SIGINT, before)

    interrupted, before = Event(), signal.getsignal(signal.SIGINT)
    signal.signal(signal.SIGINT, note)
    try:
        yield interrupted
    finally:
        signal.signal(signal.SIGINT, before)
