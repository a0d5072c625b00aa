"""nanovllm generate: the command of the stages. Stories, the first as it comes, and what they took of the pool."""

from typing import Any

import click

from .common import located, one_line_errors
from .flags import engine_flags, sampling_flags, split, stats_flag
from .interrupts import ctrl_c_raises
from .streams import read_prompt, standard_output
from .tracing import Tracing, trace_option


@click.command(params=sampling_flags(temperature=0.7, top_p=0.9, max_tokens=120) + engine_flags() + [stats_flag()])
@click.argument("prompts", nargs=-1, metavar="[PROMPT]...")
@click.option("--file", "files", multiple=True, help="a file with a prompt; may be given several times")
@trace_option
def generate(
    prompts: tuple[str, ...], files: tuple[str, ...], stats: float | None, trace: str | None, **values: Any
) -> int:
    """Go on from each PROMPT, or from six beginnings.

    The first is shown as it comes, then the others, in order. A PROMPT of - is read from standard input. One that
    begins with a dash follows a double dash: nanovllm generate -- "-1 is"

    Exit status 1: a prompt could not be served. 2: nothing was done.
    """
    engine, sampling = split(values)
    with one_line_errors():
        standard_output()
        texts = [read_prompt(prompt) if prompt == "-" else prompt for prompt in prompts]
        texts += [read_prompt(file) for file in files]

    from ..engine.sampling_params import SamplingParams
    from ..llm import LLM
    from .compiling import finish_compiling
    from .stories import PROMPTS, show, summary, with_small_pool
    from .ticker import ticking

    with one_line_errors():
        params = SamplingParams(**sampling)
        options = with_small_pool(located(engine))
        tracing = Tracing(trace)
        llm = LLM(**options)
    with ctrl_c_raises(), tracing.of(llm):
        outputs = show(ticking(llm, llm.stream(texts or PROMPTS, params), stats))
    click.echo(f"\n{llm.llm_engine.kernels.says}\n{summary(llm, outputs)}")
    if llm.llm_engine.cost_model:
        click.echo(f"load or recompute: {llm.llm_engine.cost_model}")
    finish_compiling(llm)
    return 1 if tracing.failed or any(output.error for output in outputs) else 0
