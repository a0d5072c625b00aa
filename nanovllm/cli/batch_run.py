"""A run of nanovllm batch: all that can be wrong is told first, then the engine is made, then it serves."""

from contextlib import ExitStack
from typing import Any

from ..checkpoints.chat_template import read_template
from ..checkpoints.model_config import default_sampling_params
from ..engine.sampling_params import SamplingParams
from ..llm import LLM
from ..log import tell
from .batch import BatchOptions
from .chats import check_template
from .common import located, one_line_errors
from .request import Defaults
from .requests_file import RequestsFile, open_requests
from .results_file import open_output
from .resume import read_done
from .serving import Work, serve
from .tracing import Tracing


def run_batch(options: BatchOptions, engine: dict[str, Any], given: dict[str, Any]) -> int:
    """Returns the exit status. `given` are the parameters of requests that do not say."""
    with ExitStack() as files:
        with one_line_errors():
            SamplingParams(**given)
            template = read_template(options.chat_template)
            requests = files.enter_context(open_requests(options.file, Defaults(given, engine["seed"])))
            done = read_done(options.output, requests) if options.resume else None
            if done and len(done.ids) == len(requests):
                tell(f"nothing to do: {options.output} has the results of all {len(requests)} requests")
                return 0
            tracing = Tracing(options.trace)
            llm = make_llm(engine, template, requests)
            target = open_output(options.output, options.overwrite, done and done.num_bytes)
            stream = files.enter_context(target)
        with tracing.of(llm):
            status = serve(llm, Work(requests, done.ids if done else ()), stream, engine["model"], options.stats)
    return 1 if tracing.failed else status


def make_llm(engine: dict[str, Any], template: str | None, requests: RequestsFile) -> LLM:
    """Raises ValueError, before weights are read, if there are chats and no template for them."""
    options = located(engine)
    if requests.has_chats:
        check_template(options["model"], template)
    recommended = default_sampling_params(options["model"])
    requests.recommend({name: value for name, value in recommended.items() if name != "max_tokens"})
    return LLM(**options, chat_template=template)
