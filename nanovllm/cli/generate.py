"""nanovllm generate: continue prompts in the terminal, and report how much of the KV cache the run used."""

import os
import sys
from collections.abc import Generator, Iterator
from contextlib import closing
from typing import TYPE_CHECKING, Any

import click

from ..checkpoints.known import KNOWN
from ..options.config import POOL_SIZES
from .click_options import PATH, engine_options, sampling_options, split, stats_option, usage_errors, with_checkpoint
from .terminal import StatsPrinter, ctrl_c_raises, finish_compiling, pool_line, read_prompt
from .trace import check_trace, trace_option, tracing

if TYPE_CHECKING:
    from ..llm import LLM
    from ..requests.outputs import CompletionOutput, RequestOutput

DEFAULT_PROMPTS = [
    '"Good morning," said the fox',
    "The wolf knocked at the door",
    "Once upon a time there was a princess",
    "The King had three sons, and the youngest",
    "Dorothy looked at the Scarecrow",
    "Long ago, when animals could talk,",
]
POOL_TOKENS, MAX_MODEL_LEN = 2048, 1024  # by default, so that six stories nearly fill the pool
OPTIONS = [
    *sampling_options(temperature=0.7, top_p=0.9, max_tokens=120),
    *engine_options(
        max_model_len={
            "help": "longest prompt plus output, in tokens; default: the model's own limit, which is lowered to "
            f"{MAX_MODEL_LEN} unless the size of the KV cache is set"
        },
        kv_cache_tokens={
            "help": f"size of the KV cache in tokens; default: {POOL_TOKENS}, or twice --max-model-len if that is more"
        },
        kv_cache_memory_bytes={"help": "size of the KV cache in bytes; default: see --kv-cache-tokens"},
        gpu_memory_utilization={
            "help": "share of the GPU's memory for weights and KV cache; default: see --kv-cache-tokens"
        },
        seed={"default": 2},  # the best for the default model: models/training/seed.py
    ),
    stats_option(),
]


class GenerateCommand(click.Command):
    """A command that rejects a model or an existing path as a prompt, unless it follows a double dash."""

    def parse_args(self, context: click.Context, args: list[str]) -> list[str]:
        num_after_dashes = len(args) - args.index("--") - 1 if "--" in args else 0
        unparsed = super().parse_args(context, args)
        for prompt in context.params["prompts"][: -num_after_dashes or None]:
            if prompt in KNOWN or is_checkpoint(prompt):
                raise click.UsageError(f"{prompt} is a model: write --model {prompt}, or put -- before a prompt")
            if os.path.exists(prompt):
                hint = f"--file {prompt}, --model {prompt}, or put -- before a prompt"
                raise click.UsageError(f"{prompt} is a file or a folder: write {hint}")
        return unparsed


def is_checkpoint(prompt: str) -> bool:
    """Return whether a prompt is the path of a checkpoint's folder or of a GGUF file."""
    return os.path.isfile(os.path.join(prompt, "config.json")) or (prompt.endswith(".gguf") and os.path.isfile(prompt))


@click.command(cls=GenerateCommand, params=OPTIONS)
@click.argument("prompts", nargs=-1, metavar="[PROMPT]...")
@click.option("--file", "files", type=PATH, multiple=True, help="file with a prompt; may be given several times")
@trace_option
def generate(
    prompts: tuple[str, ...], files: tuple[str, ...], stats: float | None, trace: str | None, **values: Any
) -> int:
    """Continue each PROMPT, or six built-in ones.

    The first story appears as it is generated, and the others follow in order. The PROMPT - reads standard input. Put
    a double dash before a prompt that begins with a dash: nanovllm generate -- "-1 is"

    Exit status 1: a prompt could not be served. 2: invalid options, and nothing was generated.
    """
    engine, sampling = split(values)
    with usage_errors():
        texts = [read_prompt(prompt) if prompt == "-" else prompt for prompt in prompts]
        texts += [read_prompt(file) for file in files]

    from ..llm import LLM
    from ..requests.sampling_params import SamplingParams

    with usage_errors():
        params = SamplingParams(**sampling)
        options = with_small_pool(with_checkpoint(engine))
        check_trace(trace)
        llm = LLM(**options)
    with tracing(llm, trace):
        with ctrl_c_raises():
            outputs = print_stories(with_stats(llm, llm.stream(texts or DEFAULT_PROMPTS, params), stats))
        click.echo(f"\n{llm.llm_engine.kernels.description}\n{summary(llm, outputs)}")
        if llm.llm_engine.tiers.cost_model:
            click.echo(f"load or recompute: {llm.llm_engine.tiers.cost_model}")
    finish_compiling(llm)
    return 1 if any(output.error for output in outputs) else 0


def with_small_pool(options: dict[str, Any]) -> dict[str, Any]:
    """Return the engine's options. If they don't set the size of the pool, set it to fit a few stories."""
    from ..checkpoints.model_config import read_model_config

    if any(options[size] is not None for size in POOL_SIZES):
        return options
    max_model_len = options["max_model_len"]
    if max_model_len is None:
        max_model_len = min(MAX_MODEL_LEN, read_model_config(options["model"]).max_position_embeddings)
    return options | {"max_model_len": max_model_len, "kv_cache_tokens": max(POOL_TOKENS, 2 * max_model_len)}


def with_stats(
    llm: "LLM", outputs: "Generator[RequestOutput, None, None]", seconds: float | None
) -> "Iterator[RequestOutput]":
    """Yield the outputs, and print the engine's state every `seconds` seconds, or never if it is None.

    If both appear in a terminal, yield only finished stories, so that no line about the state interrupts a story.
    """
    printer = StatsPrinter(llm, seconds)
    shares_terminal = seconds is not None and sys.stdout.isatty() and sys.stderr.isatty()
    with closing(outputs):
        for output in outputs:
            printer.print_if_due()
            if output.finished or not shares_terminal:
                yield output


def print_stories(stream: "Iterator[RequestOutput]") -> "list[RequestOutput]":
    """Print the first story as it is generated, and the others in order once they finish. Return all final outputs."""
    finished: dict[int, RequestOutput] = {}
    num_printed, num_characters = 0, 0  # printed stories, and printed characters of the first story
    for output in stream:
        index = int(output.request_id)
        if index == 0:
            text = story_text(output, output.outputs[0])
            print(text[num_characters:], end="", flush=True)
            num_characters = len(text)
        if output.finished:
            finished[index] = output
        while num_printed in finished:
            print_ending(finished[num_printed])
            num_printed += 1
    return [finished[index] for index in sorted(finished)]


def story_text(output: "RequestOutput", completion: "CompletionOutput") -> str:
    """Return the prompt and its continuation, or an empty string if an error came before any text."""
    return f"{output.prompt}{completion.text}" if completion.text or not output.error else ""


def print_ending(output: "RequestOutput") -> None:
    """Print how each sample of a request ended, after its text unless that has already been printed."""
    for completion in output.outputs:
        is_printed = output.request_id == "0" and completion.index == 0
        text = "" if is_printed else story_text(output, completion)
        print(f"{text}  [{len(completion.token_ids)} tokens, {completion.finish_reason}]\n", flush=True)
    if output.error:
        print(f"error: {output.error}", file=sys.stderr)


def summary(llm: "LLM", outputs: "list[RequestOutput]") -> str:
    """Return one line: the speed of the run, the peak use of the KV cache, and the engine's counts."""
    metrics = [output.metrics for output in outputs]
    times = [
        (m.arrival_time, m.first_token_time, m.finished_time) for m in metrics if m.first_token_time and m.finished_time
    ]
    if not times:
        return "nothing was served"
    num_tokens = sum(len(completion.token_ids) for output in outputs for completion in output.outputs)
    start, first_token, _ = times[0]
    seconds = max(finished for *_, finished in times) - start
    speed = f"{num_tokens / seconds:.0f} tokens/s, first token {(first_token - start) * 1000:.0f} ms"
    engine = llm.llm_engine
    cache_stats, host_tier = engine.kv_cache_manager.prefix_cache_stats, engine.host_tier
    counts = f"preemptions: {engine.scheduler.num_preemptions}, blocks copied: {engine.kv_cache.num_blocks_copied}"
    hits = f"tokens cached: {cache_stats.hits:,} of {cache_stats.queries:,}"
    offload = f"blocks stored: {host_tier.num_blocks_stored}, loaded: {host_tier.num_blocks_loaded}"
    return f"{speed}, {pool_line(llm.peak)}, {counts}, {hits}, {offload}"
