"""Serving a file of requests: as many are in the engine as keep it busy, and each result is written at once."""

import sys
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from threading import Event
from typing import IO

import click
from tqdm import tqdm

from ..engine.outputs import RequestOutput
from ..llm import LLM
from ..log import tell
from ..server.openai.chats import Chat
from .chats import add_request
from .compiling import finish_compiling
from .ids import Ids
from .interrupts import ctrl_c_noted
from .request import Request
from .requests_file import RequestsFile
from .results import result_line
from .results_file import write_whole
from .stories import pool_line
from .ticker import Ticker

SEATS_AHEAD = 2  # samples in the engine for each of its seats: enough for one that ends to be followed at once


@dataclass
class Work:
    """The requests of a file that have no result yet."""

    requests: RequestsFile
    done: Ids | Collection[str] = ()  # the ids of those that have

    def __len__(self) -> int:
        return len(self.requests) - len(self.done)

    def __iter__(self) -> Iterator[Request]:
        return (request for request in self.requests if request.id not in self.done)


@dataclass
class Count:
    written: int = 0
    failed: int = 0
    tokens: int = 0

    def add(self, output: RequestOutput) -> None:
        self.written += 1
        self.failed += output.error is not None
        self.tokens += sum(len(completion.token_ids) for completion in output.outputs)


def serve(llm: LLM, work: Work, stream: IO[bytes], model: str, stats: float | None = None) -> int:
    """Write a result for each request; returns the exit status.

    `model` is the name that OpenAI's form tells; the engine's state is told each `stats` seconds.
    """
    count, start, num_done = Count(), time.perf_counter(), len(work.done)
    progress = tqdm(total=len(work), unit=" requests", miniters=0, disable=not sys.stderr.isatty())
    with ctrl_c_noted() as interrupted, progress as bar:
        for request, output in outputs_of(llm, work, interrupted, Ticker(llm, stats)):
            if output.finished:
                with bar.external_write_mode(sys.stdout):  # the bar steps aside
                    write_whole(stream, result_line(request, output, model))
                count.add(output)
            bar.update(output.finished)
    there = f"; {num_done} were there already" if num_done else ""
    if interrupted.is_set():
        tell(f"interrupted: {count.written} of {len(work)} requests have their results{there}")
        raise click.Abort
    speed = f"{count.tokens:,} tokens, {count.tokens / (time.perf_counter() - start):.0f} tokens/s"
    says = llm.llm_engine.kernels.says
    tell(f"{count.written} requests, {count.failed} failed, {speed}, {pool_line(llm.peak)}{there}, {says}")
    finish_compiling(llm)
    return 1 if count.failed else 0


def failed(request: Request, error: ValueError) -> RequestOutput:
    prompt = "" if isinstance(request.prompt, Chat) else request.prompt
    return RequestOutput.failed(request.id, prompt, str(error))


def outputs_of(llm: LLM, work: Work, interrupted: Event, ticker: Ticker) -> Iterator[tuple[Request, RequestOutput]]:
    """A request's output so far whenever it got a token; of one that cannot be served, the error.

    Requests come to the engine in the order of the file, and a request only when there is room for it in front of the
    seats: a file of any length takes little memory.
    """
    held: dict[str, Request] = {}  # in the engine, by id
    engine, num_samples = llm.llm_engine, 0
    limit = SEATS_AHEAD * engine.config.max_num_seqs
    following = iter(work)
    request = next(following, None)
    while (held or request) and not interrupted.is_set():
        while request and not interrupted.is_set() and (not held or num_samples + request.params.n <= limit):
            try:
                add_request(llm, request)
                held[request.id] = request
                num_samples += request.params.n
            except ValueError as error:
                yield request, failed(request, error)
            request = next(following, None)
        ticker.tick()
        for output in engine.step() if held else []:
            owner = held[output.request_id]
            if output.finished:
                del held[output.request_id]
                num_samples -= owner.params.n
            yield owner, output
