"""nanovllm batch: a file of requests in, and for each a line of JSON out as soon as it has ended."""

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from .common import located, one_line_errors
from .flags import engine_flags, sampling_flags, split, stats_flag
from .results_file import check_output, open_output
from .streams import tell
from .tracing import Tracing, trace_option


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
def batch(
    context: click.Context,
    file: str,
    output: str,
    overwrite: bool,
    resume: bool,
    chat_template: str | None,
    stats: float | None,
    trace: str | None,
    **values: Any,
) -> int:
    """Serve a file of requests; the results are lines of JSON.

    FILE is {"requests": [{"prompt": "Once upon a time", "max_tokens": 64}, ...]}, or such requests one a line, or lines
    of OpenAI's batches; - is standard input. Requests may have an "id" and any field of SamplingParams; options are for
    those that do not say. A result is written as soon as its request has ended.

    Exit status 1: a request could not be served, and its result says why. 2: nothing was done.
    """
    engine, sampling = split(values)
    given = {name: sampling[name] for name in sampling if is_given(context, name)}
    with one_line_errors():
        check_output(output, file, overwrite, resume)
        if trace is not None and Path(trace).resolve() == Path(output).resolve():
            raise ValueError(f"{trace} is where the results go: the trace needs another file")

    from ..api import LLM, SamplingParams
    from .chats import check_template
    from .plain_template import read_template
    from .request import Defaults
    from .requests_file import open_requests
    from .resume import read_done
    from .serving import Work, serve

    with ExitStack() as files:
        with one_line_errors():
            SamplingParams(**given)
            template = read_template(chat_template)
            requests = files.enter_context(open_requests(file, Defaults(given, engine["seed"])))
            done = read_done(output, requests.ids) if resume else None
            if done and len(done.ids) == len(requests):
                tell(f"nothing to do: {output} has the results of all {len(requests)} requests")
                return 0
            options = located(engine)
            if requests.has_chats:
                check_template(options["model"], template)
            tracing = Tracing(trace)
            llm = LLM(**options, chat_template=template)
            stream = files.enter_context(open_output(output, overwrite, done and done.num_bytes))
        with tracing.of(llm):
            status = serve(llm, Work(requests, done.ids if done else ()), stream, engine["model"], stats)
    return 1 if tracing.failed else status


def is_given(context: click.Context, name: str) -> bool:
    """Whether the command line says it: what a request leaves out may have another default than the option."""
    return context.get_parameter_source(name) != ParameterSource.DEFAULT
