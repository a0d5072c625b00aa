"""nanovllm batch: serve a file of requests, and write a line of JSON for each one as soon as it finishes."""

import sys
import time
from collections.abc import Collection, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from threading import Event
from typing import IO, TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from ..log import tell
from .chat import check_template, template_option
from .click_options import PATH, engine_options, sampling_options, split, stats_option, usage_errors, with_checkpoint
from .terminal import StatsPrinter, ctrl_c_sets_event, finish_compiling, pool_line, tell_interrupted
from .trace import check_trace, trace_option, tracing

if TYPE_CHECKING:
    from ..chat.formats import Parsers
    from ..engine.outputs import RequestOutput
    from ..llm import LLM
    from .batch_files import Request, RequestsFile

SAMPLES_PER_SEAT = 2  # samples in the engine per sample that can run, so the next one is ready when one ends


@click.command(params=sampling_options() + engine_options() + [stats_option()])
@click.argument("file", type=PATH)
@click.option("--logprobs", type=int, help="number of most likely tokens to return at each position of an output")
@click.option("--prompt-logprobs", type=int, help="number of most likely tokens to return at each position of a prompt")
@click.option("--output", type=PATH, default="-", help="file for the results; default: standard output")
@click.option("--overwrite", is_flag=True, help="replace the file of results if it exists")
@template_option
@click.option(
    "--resume", is_flag=True, help="continue the file of results: requests with a result are not served again"
)
@trace_option
@click.pass_context
def batch(
    context: click.Context,
    /,
    file: str,
    output: str,
    overwrite: bool,
    resume: bool,
    chat_template: str | None,
    stats: float | None,
    trace: str | None,
    **values: Any,
) -> int:
    """Serve a file of requests, and write the results as lines of JSON.

    FILE is {"requests": [{"prompt": "Once upon a time", "max_tokens": 64}, ...]}, or one such request per line, or
    lines of OpenAI's batches; - is standard input. A request may have an "id" and any field of SamplingParams; the
    options are defaults for requests that leave a field out. In OpenAI's lines, the model's own recommendations replace
    the defaults below. A result is written as soon as its request finishes.

    Exit status 1: a request could not be served, and its result says why. 2: invalid input, and nothing was served.
    """
    engine, sampling = split(values)
    # Only options that were given count, because a checkpoint may recommend other defaults.
    source = context.get_parameter_source
    given = {name: value for name, value in sampling.items() if source(name) != ParameterSource.DEFAULT}
    with usage_errors():
        from .batch_files import Defaults, check_output, open_output, open_requests, read_done

        check_output(output, file, overwrite, resume)
        if trace is not None and Path(trace).resolve() == Path(output).resolve():
            raise ValueError(f"{trace} is the file of results: write the trace to a different file")

    from ..checkpoints.chat_template import read_template
    from ..checkpoints.model_config import default_sampling_params
    from ..engine.sampling_params import SamplingParams
    from ..llm import LLM

    with ExitStack() as files:
        with usage_errors():
            SamplingParams(**given)
            template = read_template(chat_template)
            requests = files.enter_context(open_requests(file, Defaults(given, engine["seed"])))
            done, num_bytes = read_done(output, requests) if resume else (set(), None)
            if len(done) == len(requests):
                tell(f"nothing to do: {output} has the results of all {len(requests)} requests")
                return 0
            check_trace(trace)
            options = with_checkpoint(engine)
            if requests.has_chats:
                check_template(options["model"], template)
            recommended = default_sampling_params(options["model"])
            requests.recommend({name: value for name, value in recommended.items() if name != "max_tokens"})
            llm = LLM(**options, chat_template=template)
            stream = files.enter_context(open_output(output, overwrite, num_bytes))
        with tracing(llm, trace):
            return serve_all(llm, requests, stream, engine["model"], done, stats)


def serve_all(
    llm: "LLM",
    requests: "RequestsFile | list[Request]",
    stream: IO[bytes],
    model: str,
    done: Collection[str] = (),
    stats: float | None = None,
) -> int:
    """Write a result for each request whose id is not in `done`. Return the exit status.

    OpenAI's form names the `model`. With `stats`, print the engine's state every `stats` seconds.
    """
    from tqdm import tqdm

    from .batch_files import result_line, write_line

    num_requests, start = len(requests) - len(done), time.perf_counter()
    num_written = num_failed = num_tokens = 0
    todo = (request for request in requests if request.id not in done)
    progress = tqdm(total=num_requests, unit=" requests", miniters=0, disable=not sys.stderr.isatty())
    with ctrl_c_sets_event() as interrupted, progress as bar:
        for request, output in serve(llm, todo, interrupted, StatsPrinter(llm, stats)):
            if output.finished:
                with bar.external_write_mode(sys.stdout):  # hides the bar for the write
                    write_line(stream, result_line(request, output, model))
                num_written += 1
                num_failed += output.error is not None
                num_tokens += sum(len(completion.token_ids) for completion in output.outputs)
            bar.update(output.finished)
    earlier = f"; {len(done)} already had results" if done else ""
    if interrupted.is_set():
        line = f"interrupted: {num_written} of {num_requests} requests have results{earlier}"
        tell_interrupted(line, is_after_key=False)  # the bar has ended its line
        raise click.Abort
    speed = f"{num_tokens:,} tokens, {num_tokens / (time.perf_counter() - start):.0f} tokens/s"
    kernels = llm.llm_engine.kernels.description
    tell(f"{num_written} requests, {num_failed} failed, {speed}, {pool_line(llm.peak)}{earlier}, {kernels}")
    finish_compiling(llm)
    return 1 if num_failed else 0


def serve(
    llm: "LLM", requests: "Iterator[Request]", interrupted: Event, printer: StatsPrinter
) -> "Iterator[tuple[Request, RequestOutput]]":
    """Yield each request with its output so far, whenever it has a new token or an error.

    Requests enter the engine in the order of the file, and only while there is room for them just ahead of the running
    ones, so a file of any length takes little memory.
    """
    from ..engine.outputs import RequestOutput
    from ..server.protocol import parsers_of

    engine, num_samples = llm.llm_engine, 0
    parsers = parsers_of(llm.tokenizer, llm.chat_template)
    limit = SAMPLES_PER_SEAT * engine.config.max_num_seqs
    added: dict[str, Request] = {}  # requests in the engine, by id
    request = next(requests, None)
    while (added or request) and not interrupted.is_set():
        while request and not interrupted.is_set() and (not added or num_samples + request.params.n <= limit):
            try:
                added[request.id] = add_request(llm, request, parsers)
                num_samples += request.params.n
            except ValueError as error:
                yield request, RequestOutput.failed(request.id, request.prompt, str(error))
            request = next(requests, None)
        printer.print_if_due()
        for output in engine.step() if added else []:
            owner = added[output.request_id]
            if output.finished:
                del added[output.request_id]
                num_samples -= owner.params.n
            yield owner, output


def add_request(llm: "LLM", request: "Request", parsers: "Parsers") -> "Request":
    """Add a request to the engine, with a chat as its rendered prompt. Return it with the format of its messages.

    Raise ValueError if it can never be served.
    """
    from ..checkpoints.chat_template import render_chat
    from ..server.protocol import Chat

    engine, chat = llm.llm_engine, request.prompt
    if not isinstance(chat, Chat):
        engine.add_request(request.id, chat, request.params)
        return request
    text = render_chat(engine.get_tokenizer(), chat.messages, **{"chat_template": llm.chat_template} | chat.options)
    special = {"add_special_tokens": False}  # the template itself writes BOS
    format = request.body.message_format(parsers, text, request.params) if request.body else None
    engine.add_request(request.id, text, request.params, tokenization_kwargs=special)
    return replace(request, format=format)
