"""Stories for `nanovllm generate`: six beginnings, a pool of a few stories, and how they appear on the screen."""

import sys
from collections.abc import Iterator
from typing import Any

from ..checkpoints.model_config import read_model_config
from ..engine.config import POOL_SIZES
from ..engine.kv_cache import PoolReport
from ..engine.outputs import CompletionOutput, RequestOutput
from ..llm import LLM

PROMPTS = [
    '"Good morning," said the fox',
    "The wolf knocked at the door",
    "Once upon a time there was a princess",
    "The King had three sons, and the youngest",
    "Dorothy looked at the Scarecrow",
    "Long ago, when animals could talk,",
]
POOL_TOKENS, MAX_MODEL_LEN = 2048, 1024  # unless flags say otherwise: a pool small enough to be felt


def with_small_pool(options: dict[str, Any]) -> dict[str, Any]:
    """Return the engine's options, with a pool of a few stories unless they say how large it is."""
    if any(options[size] is not None for size in POOL_SIZES):
        return options
    longest = options["max_model_len"]
    if longest is None:
        longest = min(MAX_MODEL_LEN, read_model_config(options["model"]).max_position_embeddings)
    return options | {"max_model_len": longest, "kv_cache_tokens": max(POOL_TOKENS, 2 * longest)}


def show(stream: Iterator[RequestOutput]) -> list[RequestOutput]:
    """Print the first story as it comes, and then the others, in order, once they have ended. Return all of them."""
    finished: dict[int, RequestOutput] = {}
    num_shown, printed = 0, 0  # stories, and characters of the first
    for output in stream:
        index = int(output.request_id)
        if index == 0:
            text = story(output, output.outputs[0])
            print(text[printed:], end="", flush=True)
            printed = len(text)
        if output.finished:
            finished[index] = output
        while num_shown in finished:
            print_ending(finished[num_shown])
            num_shown += 1
    return [finished[index] for index in sorted(finished)]


def story(output: RequestOutput, completion: CompletionOutput) -> str:
    """Return the prompt and the text generated for it; no text if an error came before any."""
    return f"{output.prompt}{completion.text}" if completion.text or not output.error else ""


def print_ending(output: RequestOutput) -> None:
    """Print what is not on the screen yet: nothing of the first story, all of the others."""
    for completion in output.outputs:
        is_shown = output.request_id == "0" and completion.index == 0
        text = "" if is_shown else story(output, completion)
        print(f"{text}  [{len(completion.token_ids)} tokens, {completion.finish_reason}]\n", flush=True)
    if output.error:
        print(f"error: {output.error}", file=sys.stderr)


def summary(llm: LLM, outputs: list[RequestOutput]) -> str:
    """Return one line: how fast the run was, what it took of the pool at its peak, and what the engine counted."""
    served = [output for output in outputs if output.metrics.first_token_time is not None]
    if not served:
        return "nothing was served"
    num_tokens = sum(len(completion.token_ids) for output in served for completion in output.outputs)
    start = served[0].metrics.arrival_time
    seconds = max(output.metrics.finished_time for output in served) - start
    first_token = served[0].metrics.first_token_time - start
    speed = f"{num_tokens / seconds:.0f} tokens/s, first token {first_token * 1000:.0f} ms"
    return f"{speed}, {pool_line(llm.peak)}, {counts(llm)}"


def pool_line(pool: PoolReport) -> str:
    """Return how much of the pool was reserved and used at the peak of a run."""
    share = pool.used / max(pool.held, 1)
    return (
        f"KV slots: {pool.held:,} of {pool.num_slots:,} reserved, {pool.used:,} used ({share:.0%}) |{pool.strip(32)}|"
    )


def counts(llm: LLM) -> str:
    """Return the engine's counts since its start."""
    preemptions, copies = llm.llm_engine.scheduler.num_preemptions, llm.kv_cache.num_blocks_copied
    cache = llm.kv_cache_manager.prefix_cache_stats
    hits = f"tokens cached: {cache.hits:,} of {cache.queries:,}"
    tier = llm.llm_engine.host_tier
    offload = f"blocks stored: {tier.num_blocks_stored}, loaded: {tier.num_blocks_loaded}"
    return f"preemptions: {preemptions}, blocks copied: {copies}, {hits}, {offload}"
