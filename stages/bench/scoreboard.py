"""The scoreboard: what each stage buys and what it costs, on one workload and the shipped checkpoint.

A row has the pool's bytes when most of it was used, the speed, the steps, the tokens through the model, and the blocks
copied, stored and loaded. `run` is what `make run` shows, `peers` compares one sequence with transformers.
"""

import contextlib
import importlib
import io
import statistics
import time
from argparse import Namespace
from collections import Counter
from functools import partial
from typing import Any, NamedTuple

import torch

from stages.bench.engines import stage
from stages.bench.harness import median_scores, medians, ratio, seconds_of, take_turns
from stages.bench.models import STORYTELLER
from stages.bench.racing import sampling_params
from stages.bench.workloads import mixed_workload

POOL_TOKENS = 8192
RUN_PROMPT = "Once upon a time"
COMMANDS = {  # of the lessons, each ends in a line that shows its stage
    "s4": ("4 --kv-cache-tokens 2048", "4 --kv-cache-tokens 256 --max-model-len 256"),
}
STORY_WIDTH, STORY_END = 100, 38  # characters of a story that README.md shows, and of its end
NUM_ROUNDS, SECONDS = 3, 60  # no round begins after that time, but for the first
PEER_TOKENS, PEER_PAIRS = 128, 5


class Variant(NamedTuple):
    """A stage with the options that it is run with; most stages have one."""

    label: str
    name: str
    options: dict[str, Any]


VARIANTS = [
    Variant("s1, max_model_len each", "s1", {"reservation": "max_model_len"}),
    Variant("s1, prompt + max_tokens", "s1", {"reservation": "request"}),
    Variant("s2, blocks of 16", "s2", {}),
    Variant("s3, tiles of blocks", "s3", {}),
    Variant("s4, no promises", "s4", {}),
    Variant("s5, shared blocks", "s5", {}),
    Variant("s6, prefix cache", "s6", {}),
    Variant("s7, host pool", "s7", {}),
]


def measure(args: Namespace) -> dict[str, Any]:
    """The table. About a minute and a half."""
    for variant in VARIANTS:
        score(variant, num_requests=2)  # warms up
    calls = {variant.label: partial(score, variant) for variant in VARIANTS}
    rounds = take_turns(calls, NUM_ROUNDS, warm_ups=0, least_rounds=1, seconds=SECONDS, title="stages")
    scores = median_scores(rounds)
    return {"scoreboard": {variant.label: scores[variant.label] for variant in VARIANTS}}


def score(variant: Variant, num_requests: int = 32) -> dict[str, float]:
    """One run of the mixed workload."""
    llm = stage(variant.name).LLM(STORYTELLER, dtype="float32", kv_cache_tokens=POOL_TOKENS, **variant.options)
    requests = mixed_workload(llm.model_config.vocab_size, num_requests)
    params = [sampling_params(variant.name, request) for request in requests]
    started = time.perf_counter()
    seats, finished = Counter[int](), []
    for output in llm.stream([request.prompt_token_ids for request in requests], params):
        seats[llm.model_runner.num_steps] += 1  # an output for each sequence of a step
        if output.finished:
            finished.append(output)
    seconds = time.perf_counter() - started
    num_tokens = sum(len(output.outputs[0].token_ids) for output in finished)
    assert num_tokens == sum(request.num_output_tokens for request in requests), "a request ended early"
    waits = [output.metrics.first_token_time - output.metrics.arrival_time for output in finished]
    return {
        "seats": max(seats.values()),
        "steps": llm.model_runner.num_steps,
        "tokens_computed": llm.model_runner.num_tokens,
        "tokens_per_second": num_tokens / seconds,
        "first_token_seconds": statistics.median(waits),
        **peak_bytes(llm),
        **blocks_moved(variant.name, llm),
    }


def peak_bytes(llm: Any) -> dict[str, int]:
    """The pool when most of it was used."""
    peak, size = llm.peak, llm.kv_cache.bytes_per_token
    return {
        "promised_bytes": peak.promised * size,
        "held_bytes": peak.held * size,
        "used_bytes": peak.used * size,
        "wasted_bytes": peak.wasted * size,
    }


def blocks_moved(name: str, llm: Any) -> dict[str, int]:
    """Blocks copied, from stage 5 on; stored on the host and loaded from it, in stage 7."""
    moved = {}
    if name in ("s5", "s6", "s7"):
        moved["blocks_copied"] = llm.kv_cache.num_blocks_copied
    if name == "s7":
        host = llm.llm_engine.host_kv_cache
        moved |= {"blocks_stored": host.num_blocks_stored, "blocks_loaded": host.num_blocks_loaded}
    return moved


def measure_run(args: Namespace) -> dict[str, Any]:
    """What commands print: a story in stages 1 and 2, and the last line where a lesson shows it."""
    lessons = {name: "\n\n".join(map(last_line, commands)) for name, commands in COMMANDS.items()}
    return {"run": {"screen": "\n\n".join(screen(number) for number in ("1", "2")), "lessons": lessons}}


def last_line(command: str) -> str:
    """What a lesson shows of `python -m stages ...`: the command, and the line that it ends in."""
    return f"$ python -m stages {command}\n...\n{told(*command.split()).splitlines()[-1]}"


def told(number: str, *argv: str) -> str:
    """What a stage's command prints, without errors."""
    command = importlib.import_module("stages.__main__")
    for _ in range(2):  # the first run in a process also waits for what torch makes only once
        captured = io.StringIO()
        with contextlib.redirect_stdout(captured):
            command.main([number, "--model", str(STORYTELLER), *argv])
    return captured.getvalue().strip()


def screen(number: str) -> str:
    """What README.md shows of a stage's `make run`: the command, the story's two ends, the last line."""
    story, *_, last = told(number, RUN_PROMPT).split("\n\n")
    return "\n".join([f'$ make run STAGE={number} PROMPT="{RUN_PROMPT}"', ends(story), last.strip()])


def ends(story: str) -> str:
    """The beginning and the end of a text, on one line.

    >>> ends("The fox ran to the henhouse, and the hens saw him. " * 3 + " [40 tokens, length]")
    'The fox ran to the henhouse, and the hens saw him. The fox ... hens saw him.  [40 tokens, length]'
    """
    line = story.replace("\n", " ")
    beginning = line[: STORY_WIDTH - STORY_END].rsplit(" ", 1)[0]
    ending = line[-STORY_END:].split(" ", 1)[1]
    return f"{beginning} ... {ending}"


def measure_peers(args: Namespace) -> dict[str, Any]:
    """Single-stream decode in float32, stage 1 and transformers' `generate` in turn; the ratio of each pair."""
    from transformers import LlamaForCausalLM

    llm = stage("s1").LLM(STORYTELLER, dtype="float32")
    peer = LlamaForCausalLM.from_pretrained(STORYTELLER, dtype=torch.float32)
    request = mixed_workload(llm.model_config.vocab_size)[1]._replace(num_output_tokens=PEER_TOKENS)
    prompt, params = request.prompt_token_ids, sampling_params("s1", request)
    options = {"do_sample": False, "max_new_tokens": PEER_TOKENS, "eos_token_id": None, "pad_token_id": 0}
    calls = {
        "ours": lambda: PEER_TOKENS / seconds_of(lambda: llm.generate([prompt], params)),
        "transformers": lambda: PEER_TOKENS / seconds_of(lambda: peer.generate(torch.tensor([prompt]), **options)),
    }
    pairs = take_turns(calls, PEER_PAIRS, title="transformers")
    lengths = {"prompt_tokens": len(prompt), "output_tokens": PEER_TOKENS}
    return {"peers": {**lengths, **medians(pairs), "ratio": ratio(pairs, "ours", "transformers").ratio}}
