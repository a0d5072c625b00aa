"""nanovllm batch: a file of requests in, and for each a line of JSON out as soon as it has ended."""

import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import IO, Any

import click
from tqdm import tqdm

from .cli import SAMPLING, build_llm, engine_flags, pool_line, sampling_flags, split, told_in_one_line
from .engine import LLMEngine
from .flags import Command, Flag
from .llm import LLM
from .outputs import RequestOutput
from .requests_file import Request, read_requests
from .results import result_line
from .sampling import SamplingParams

LOGPROBS = [
    Flag("--logprobs", SAMPLING, type=int, help="of each token, how many of the likeliest in its place are told"),
    Flag("--prompt-logprobs", SAMPLING, type=int, help="the same for the tokens of the prompt"),
]


@click.command(cls=Command, params=[*sampling_flags(), *LOGPROBS, *engine_flags()])
@click.argument("file")
@click.option("--output", metavar="PATH", default="-", help="where the results go; default: standard output")
@click.option("--overwrite", is_flag=True, help="replace the file of results if there is one")
def batch(file: str, output: str, overwrite: bool, **values: Any) -> int:
    """Serve a file of requests; the results are lines of JSON.

    FILE is {"requests": [{"prompt": "Once upon a time", "max_tokens": 64}, ...]}, or such requests one a line; - is
    standard input. They may have an "id" and any field of SamplingParams; the options under Sampling are for those that
    do not say. A result is written as soon as its request has ended.

    Exit status 1: a request could not be served, and its result says why. 2: nothing was done.
    """
    engine, sampling = split(values)
    with told_in_one_line():
        SamplingParams(**sampling)
        requests = load_requests(file, sampling)
        check_output(output, file, overwrite)
        llm = build_llm(engine)
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
    by_id, tally = {request.id: request for request in requests}, Tally(len(requests))
    try:
        with tqdm(total=len(requests), unit=" requests", miniters=0, disable=None) as bar:  # None: off if no terminal
            for output in outputs_of(llm.llm_engine, requests):
                tally.note(output)
                if output.finished:
                    line = result_line(by_id[output.request_id], output)
                    with bar.external_write_mode(stream):  # the bar steps aside
                        try:
                            stream.write(line)
                            stream.flush()
                        finally:  # an interrupt right after the line was written does not leave it uncounted
                            tally.num_written += 1
                bar.set_postfix_str(f"{tally.tokens_per_second:.0f} tokens/s", refresh=False)
                bar.update(int(output.finished))
    except KeyboardInterrupt:
        click.echo(f"interrupted: {tally.num_written} of {tally.num_requests} requests have their results", err=True)
        raise click.Abort from None
    click.echo(f"{tally}, {pool_line(llm.peak)}", err=True)
    return 1 if tally.num_failed else 0


def outputs_of(engine: LLMEngine, requests: list[Request]) -> Iterator[RequestOutput]:
    """A request's output so far whenever it got a token; of one that cannot be served, the error."""
    for request in requests:
        try:
            engine.add_request(request.id, request.prompt, request.params)
        except ValueError as error:
            yield RequestOutput.failed(request.id, request.prompt, str(error))
    while engine.has_unfinished_requests():
        yield from engine.step()


class Tally:
    """What has come of a batch so far."""

    def __init__(self, num_requests: int) -> None:
        self.num_requests = num_requests
        self.num_written = self.num_failed = self.num_tokens = 0
        self._started = time.perf_counter()
        self._tokens_of: dict[str, int] = {}  # of those that have not ended

    def note(self, output: RequestOutput) -> None:
        num_tokens = sum(len(completion.token_ids) for completion in output.outputs)
        self.num_tokens += num_tokens - self._tokens_of.pop(output.request_id, 0)
        if output.finished:
            self.num_failed += output.error is not None
        else:
            self._tokens_of[output.request_id] = num_tokens

    @property
    def tokens_per_second(self) -> float:
        return self.num_tokens / (time.perf_counter() - self._started)

    def __str__(self) -> str:
        speed = f"{self.num_tokens:,} tokens, {self.tokens_per_second:.0f} tokens/s"
        return f"{self.num_written} requests, {self.num_failed} failed, {speed}"
