"""nanovllm generate: the command of the stages. Stories, the first as it comes, and what they took of the pool."""

from typing import Any

import click

from ..api import LLM, SamplingParams
from ..core.stories import PROMPTS, show, summary, with_small_pool
from .common import engine_flags, find_checkpoint, one_line_errors, sampling_flags, split
from .streams import read_prompt, standard_output
from .tracing import Tracing, trace_option


@click.command(params=sampling_flags(temperature=0.7, top_p=0.9, max_tokens=120) + engine_flags())
@click.argument("prompts", nargs=-1, metavar="[PROMPT]...")
@trace_option
def generate(prompts: tuple[str, ...], trace: str | None, **values: Any) -> int:
    """Go on from each PROMPT, or from six beginnings.

    The first is shown as it comes, then the others, in order. A PROMPT of - is read from standard input.

    Exit status 1: a prompt could not be served. 2: nothing was done.
    """
    engine, sampling = split(values)
    with one_line_errors():
        params = SamplingParams(**sampling)
        standard_output()
        texts = [read_prompt() if prompt == "-" else prompt for prompt in prompts or PROMPTS]
        find_checkpoint(engine["model"])
        tracing = Tracing(trace)
        llm = LLM(**with_small_pool(engine))
    with tracing.of(llm):
        outputs = show(llm.stream(texts, params))
    click.echo("\n" + summary(llm, outputs))
    if llm.llm_engine.cost_model:
        click.echo(f"load or recompute: {llm.llm_engine.cost_model}")
    return 1 if tracing.failed or any(output.error for output in outputs) else 0
