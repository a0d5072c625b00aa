"""nanovllm batch: serve a file of requests, and write a line of JSON for each request as soon as it finishes."""

import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from threading import Event
from typing import IO, TYPE_CHECKING, Any, NamedTuple

import click
from click.core import ParameterSource

from ..log import tell
from .chat import check_template, template_option
from .click_options import PATH, engine_options, sampling_options, split, stats_option, usage_errors, with_checkpoint
from .terminal import StatsPrinter, ctrl_c_raises, ctrl_c_sets_event, finish_compiling, pool_line, tell_interrupted
from .trace import check_trace, trace_option, tracing

if TYPE_CHECKING:
    from ..chat.formats import ModelFormats
    from ..llm import LLM
    from ..requests.outputs import RequestOutput
    from .batch_files import Request, RequestsFile

REQUESTS_PER_TASK = 128  # on Ray; with fewer, an engine would idle more often when a task ends
OVERSUBSCRIPTION = 2  # samples in the engine for each that can run, so that another is waiting when one ends


@click.command(params=sampling_options() + engine_options() + [stats_option()])
@click.argument("file", type=PATH)
@click.option("--logprobs", type=int, help="number of most likely tokens to return at each position of an output")
@click.option("--prompt-logprobs", type=int, help="number of most likely tokens to return at each position of a prompt")
@click.option("--output", type=PATH, default="-", help="file for the results; default: standard output")
@click.option("--overwrite", is_flag=True, help="replace the file of results if it exists")
@template_option
@click.option(
    "--resume", is_flag=True, help="continue the file of results: requests that have results are not served again"
)
@click.option("--ray", "on_ray", is_flag=True, help="serve on the Ray cluster at RAY_ADDRESS, or start one here")
@click.option(
    "--data-parallel-size",
    type=click.IntRange(min=1),
    help="number of engines on Ray; default: one per GPU, or one per machine without GPUs",
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
    on_ray: bool,
    data_parallel_size: int | None,
    chat_template: str | None,
    stats: float | None,
    trace: str | None,
    **values: Any,
) -> int:
    """Serve a file of requests, and write the results as lines of JSON.

    FILE is {"requests": [{"prompt": "Once upon a time", "max_tokens": 64}, ...]}, or one such request per line, or a
    batch in OpenAI's format; - is standard input. A request may have an "id" and any field of SamplingParams; the
    options are defaults for requests that leave a field out. For OpenAI's format, the model's own recommendations
    replace the defaults below. A result is written as soon as its request finishes.

    Exit status 1: a request could not be served, and its result says why. 2: invalid input, and nothing was served.
    """
    engine, sampling = split(values)
    # Keep only the options that the user gave, because a checkpoint may recommend other defaults.
    source_of = context.get_parameter_source
    given_params = {name: value for name, value in sampling.items() if source_of(name) != ParameterSource.DEFAULT}
    with usage_errors():
        from .batch_files import Defaults, check_output, open_output, open_requests, read_done

        check_output(output, file, overwrite, resume)
        if trace is not None and Path(trace).resolve() == Path(output).resolve():
            raise ValueError(f"{trace} is the file of results: write the trace to a different file")
        if data_parallel_size is not None and not on_ray:
            raise ValueError(f"--data-parallel-size is {data_parallel_size}, but --ray is missing: set both")
        for name, value in (("--trace", trace), ("--stats", stats)):
            if on_ray and value is not None:
                raise ValueError(f"{name} needs an engine in this process: it cannot be combined with --ray")
        if on_ray:
            import_module("ray")  # raises before the file is read

    from ..checkpoints.chat_template import read_template
    from ..checkpoints.model_config import default_sampling_params
    from ..llm import LLM
    from ..requests.sampling_params import SamplingParams

    with ExitStack() as files:
        with usage_errors():
            SamplingParams(**given_params)  # raises for an invalid value
            template = read_template(chat_template)
            requests = files.enter_context(open_requests(file, Defaults(given_params, engine["seed"])))
            done_ids, num_bytes = read_done(output, requests) if resume else (set(), None)
            if len(done_ids) == len(requests):
                tell(f"nothing to do: {output} has the results of all {len(requests)} requests")
                return 0
            check_trace(trace)
            options = with_checkpoint(engine)
            if requests.has_chats:
                check_template(options["model"], template)
            recommended = default_sampling_params(options["model"])
            requests.recommend({name: value for name, value in recommended.items() if name != "max_tokens"})
            if not on_ray:
                llm = LLM(**options, chat_template=template)
            output_stream = files.enter_context(open_output(output, overwrite, num_bytes))
        if on_ray:
            build_worker = partial(RayWorker, options, template, engine["model"])
            return serve_on_ray(build_worker, requests, output_stream, done_ids, data_parallel_size, engine["device"])
        with tracing(llm, trace):
            return serve_all(llm, requests, output_stream, engine["model"], done_ids, stats)


class Result(NamedTuple):
    """The result of a request, as a line for the file of results."""

    line: str
    is_failed: bool
    num_tokens: int

    @classmethod
    def of(cls, request: "Request", output: "RequestOutput", model: str) -> "Result":
        """Return the result of a request. A result in OpenAI's format contains the name `model`."""
        from .batch_files import result_line

        num_tokens = sum(len(completion.token_ids) for completion in output.outputs)
        return cls(result_line(request, output, model), output.error is not None, num_tokens)


@dataclass
class ResultsWriter:
    """A writer of results, which shows a progress bar, and counts at the end."""

    output_stream: IO[bytes]
    num_requests: int  # to serve in this run
    num_earlier: int  # requests that already had results before this run
    num_written: int = 0
    num_failed: int = 0
    num_tokens: int = 0
    start: float = field(default_factory=time.perf_counter)

    def write(self, results: Iterable[Result | None]) -> None:
        """Write results as they arrive. None stands for an update that finished no request."""
        from tqdm import tqdm

        from .batch_files import write_line

        progress = tqdm(total=self.num_requests, unit=" requests", miniters=0, disable=not sys.stderr.isatty())
        with progress as bar:
            for result in results:
                if result is not None:
                    with bar.external_write_mode(sys.stdout):  # hides the bar during the write
                        write_line(self.output_stream, result.line)
                    self.num_written += 1
                    self.num_failed += result.is_failed
                    self.num_tokens += result.num_tokens
                bar.update(result is not None)

    def interrupted(self) -> click.Abort:
        """Print how many requests have results. Return the exception that ends the command."""
        line = f"interrupted: {self.num_written} of {self.num_requests} requests have results{self._earlier_results}"
        tell_interrupted(line, is_after_key=False)  # the progress bar has already ended the line
        return click.Abort()

    def finish(self, *details: str) -> int:
        """Print the counts, the speed, and `details` about the engine. Return the exit status."""
        speed = f"{self.num_tokens:,} tokens, {self.num_tokens / (time.perf_counter() - self.start):.0f} tokens/s"
        counts = f"{self.num_written} requests, {self.num_failed} failed"
        tell(", ".join([counts, speed, *details]) + self._earlier_results)
        return 1 if self.num_failed else 0

    @property
    def _earlier_results(self) -> str:
        return f"; {self.num_earlier} already had results" if self.num_earlier else ""


def serve_all(
    llm: "LLM",
    requests: "RequestsFile | list[Request]",
    output_stream: IO[bytes],
    model: str,
    done_ids: Collection[str] = (),
    stats_seconds: float | None = None,
) -> int:
    """Write a result for each request whose id is not in `done_ids`. Return the exit status.

    Results in OpenAI's format contain the name `model`. With `stats_seconds`, print the engine's state at this
    interval.
    """
    writer = ResultsWriter(output_stream, len(requests) - len(done_ids), len(done_ids))
    remaining_requests = (request for request in requests if request.id not in done_ids)
    with ctrl_c_sets_event() as interrupted:
        outputs = serve(llm, remaining_requests, interrupted, StatsPrinter(llm, stats_seconds))
        writer.write(Result.of(request, output, model) if output.finished else None for request, output in outputs)
    if interrupted.is_set():
        raise writer.interrupted()
    status = writer.finish(pool_line(llm.peak), llm.llm_engine.kernels.description)
    finish_compiling(llm)
    return status


class RayWorker:
    """An engine in a Ray actor, which gets up to REQUESTS_PER_TASK requests at a time."""

    def __init__(self, options: dict[str, Any], chat_template: str | None, model: str) -> None:
        from ..llm import LLM

        self._llm, self._model = LLM(**options, chat_template=chat_template), model

    def __call__(self, requests: "Sequence[Request]") -> list[Result]:
        """Serve the requests. Return their results, in the order in which they finish."""
        outputs = serve(self._llm, iter(requests), Event(), StatsPrinter(self._llm, None))
        return [Result.of(request, output, self._model) for request, output in outputs if output.finished]


def serve_on_ray(
    build_worker: Callable[[], RayWorker],
    requests: "RequestsFile",
    output_stream: IO[bytes],
    done_ids: Collection[str],
    num_engines: int | None,
    device: str | None,
) -> int:
    """Do the same as serve_all(), with engines on Ray. Ctrl-C discards the running requests.

    Raise click.ClickException if an engine or the cluster fails, and click.Abort on Ctrl-C.
    """
    from ..bench.report import last_line
    from ..cluster.ray_data import Cluster, RayError, WorkerError

    with usage_errors():
        cluster = Cluster(num_engines, device)
    writer = ResultsWriter(output_stream, len(requests) - len(done_ids), len(done_ids))
    remaining_requests = (request for request in requests if request.id not in done_ids)
    try:
        with ctrl_c_raises(), cluster:
            writer.write(cluster.map(build_worker, remaining_requests, REQUESTS_PER_TASK))
            return writer.finish(f"engines on Ray: {cluster.num_engines}")
    except KeyboardInterrupt:
        raise writer.interrupted() from None
    except (RayError, WorkerError) as error:
        raise click.ClickException(f"Ray: {last_line(str(error))}") from None


def serve(
    llm: "LLM", requests: "Iterator[Request]", interrupted: Event, printer: StatsPrinter
) -> "Iterator[tuple[Request, RequestOutput]]":
    """Yield each request with its output so far, whenever it has a new token or an error.

    Requests enter the engine in the order of `requests`, and only a few of them wait there at any time, so a file of
    any length takes little memory. Once `interrupted` is set, no other step runs.
    """
    from ..requests.outputs import RequestOutput
    from ..server.bodies import model_formats

    engine, num_samples = llm.llm_engine, 0
    formats = model_formats(llm.tokenizer, llm.chat_template)
    max_samples = OVERSUBSCRIPTION * engine.config.max_num_seqs
    added: dict[str, Request] = {}  # requests in the engine, by id
    request = next(requests, None)
    while (added or request) and not interrupted.is_set():
        while request and not interrupted.is_set() and (not added or num_samples + request.params.n <= max_samples):
            try:
                added[request.id] = add_request(llm, request, formats)
                num_samples += request.params.n
            except ValueError as error:
                yield request, RequestOutput.failed(request.id, request.prompt, str(error))
            request = next(requests, None)
        printer.print_if_due()
        for output in engine.step() if added else []:
            request_of_output = added[output.request_id]
            if output.finished:
                del added[output.request_id]
                num_samples -= request_of_output.params.n
            yield request_of_output, output


def add_request(llm: "LLM", request: "Request", formats: "ModelFormats") -> "Request":
    """Add a request to the engine, with a chat rendered as text. Return the request, and set `format` for a chat.

    Raise ValueError if the request can never be served.
    """
    from ..checkpoints.chat_template import render_chat
    from ..server.bodies import Chat

    engine, prompt = llm.llm_engine, request.prompt
    if not isinstance(prompt, Chat):
        engine.add_request(request.id, prompt, request.params)
        return request
    text = render_chat(engine.get_tokenizer(), prompt.messages, **{"chat_template": llm.chat_template} | prompt.options)
    tokenizer_options = {"add_special_tokens": False}  # the template already adds BOS
    format = request.body.message_format(formats, text, request.params) if request.body else None
    engine.add_request(request.id, text, request.params, tokenization_kwargs=tokenizer_options)
    return replace(request, format=format)
