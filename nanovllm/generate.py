"""nanovllm generate: the first story as it comes, the others whole, and what it took of the pool."""

import sys
from collections.abc import Iterator
from typing import Any

import click

from .cli import build_llm, engine_flags, find_checkpoint, pool_line, sampling_flags, split, told_in_one_line
from .config import POOL_SIZES
from .flags import Command
from .llama import ModelConfig
from .llm import LLM
from .outputs import RequestOutput
from .sampling import SamplingParams

PROMPTS = [
    '"Good morning," said the fox',
    "The wolf knocked at the door",
    "Once upon a time there was a princess",
    "The King had three sons, and the youngest",
    "Dorothy looked at the Scarecrow",
    "Long ago, when animals could talk,",
]
POOL_TOKENS, MAX_MODEL_LEN = 2048, 1024  # unless flags say otherwise: a pool small enough to be felt


@click.command(cls=Command, params=sampling_flags(temperature=0.7, top_p=0.9, max_tokens=120) + engine_flags())
@click.argument("prompts", nargs=-1, metavar="[PROMPT]...")
def generate(prompts: tuple[str, ...], **values: Any) -> int:
    """Go on from each PROMPT, or from six beginnings.

    The first is shown as it comes, then the others, in order. A PROMPT of - is read from standard input.

    Exit status 1: a prompt could not be served. 2: nothing was done.
    """
    engine, sampling = split(values)
    with told_in_one_line():
        params = SamplingParams(**sampling)
        texts = [sys.stdin.read().rstrip("\n") if prompt == "-" else prompt for prompt in prompts or PROMPTS]
        llm = build_llm(with_small_pool(engine))
    outputs = show(llm.stream(texts, params))
    click.echo("\n" + summary(llm, outputs))
    if llm.llm_engine.cost_model:
        click.echo(f"swap or recompute: {llm.llm_engine.cost_model}")
    return 1 if any(output.error for output in outputs) else 0


def with_small_pool(engine: dict[str, Any]) -> dict[str, Any]:
    """The engine's options, with a pool of a few stories unless they say how large it is."""
    if any(engine[size] is not None for size in POOL_SIZES):
        return engine
    find_checkpoint(engine["model"])
    positions = ModelConfig.from_folder(engine["model"]).max_position_embeddings
    longest = min(MAX_MODEL_LEN, positions) if engine["max_model_len"] is None else engine["max_model_len"]
    return engine | {"max_model_len": longest, "kv_cache_tokens": max(POOL_TOKENS, 2 * longest)}


def show(stream: Iterator[RequestOutput]) -> list[RequestOutput]:
    """Print the first story as it comes and the others whole, in order, once they have ended. Returns all of them."""
    finished: dict[int, RequestOutput] = {}
    num_shown, printed = 0, 0  # stories, and characters of the first
    for output in stream:
        index = int(output.request_id)
        if index == 0 and not output.error:
            text = (output.prompt or "") + output.outputs[0].text
            click.echo(text[printed:], nl=False)
            printed = len(text)
        if output.finished:
            finished[index] = output
        while num_shown in finished:
            show_ending(finished[num_shown])
            num_shown += 1
    return [finished[index] for index in sorted(finished)]


def show_ending(output: RequestOutput) -> None:
    """What is not on the screen yet: of the first story nothing is left, of the others all."""
    if output.error:
        click.echo(f"error: {output.error}", err=True)
    for completion in output.outputs:
        is_shown = output.request_id == "0" and completion.index == 0
        if not output.error and not is_shown:
            click.echo(f"{output.prompt}{completion.text}", nl=False)
        click.echo(f"  [{len(completion.token_ids)} tokens, {completion.finish_reason}]\n")


def summary(llm: LLM, outputs: list[RequestOutput]) -> str:
    """One line: how fast, and what it took of the pool when most of it was used."""
    served = [output for output in outputs if not output.error]
    if not served:
        return "nothing was served"
    num_tokens = sum(len(completion.token_ids) for output in served for completion in output.outputs)
    start = served[0].metrics.arrival_time
    seconds = max(output.metrics.finished_time for output in served) - start
    first_token = served[0].metrics.first_token_time - start
    return f"{num_tokens / seconds:.0f} tokens/s, first token {first_token * 1000:.0f} ms, {pool_line(llm.peak)}"
