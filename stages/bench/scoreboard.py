"""The scoreboard: the gain and the cost of each stage, on one workload and the shipped checkpoint.

All stages serve the 32 requests side by side, a slice at a time. A row has the pool's bytes at its peak, the speed, the
steps, the tokens through the model, and the blocks copied, stored and loaded. `overhead` compares speeds of the same
rounds: nothing is forked, shared or preempted there, so it is the cost of stages 5 to 7 where nothing needs them.
`run` is the output of `make run`, and `peers` compares one sequence with transformers.
"""

import contextlib
import importlib
import io
import itertools
import shlex
import statistics
from argparse import Namespace
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch

from nanovllm.bench.harness import Scores, Spread, median_scores, ratio, timed, with_spreads
from nanovllm.bench.workload import mixed_tasks
from stages.bench.engines import stage
from stages.bench.models import STORYTELLER
from stages.bench.racing import Racer, blocks_moved, race, sampling_params
from stages.bench.steady import until_steady

POOL_TOKENS = 8192
RUN_PROMPT = "Once upon a time"
KING = "Once upon a time there was a king who had three sons, and the"  # with one word more: longer than a block
SCARCE = "--kv-cache-tokens 512 --max-model-len 256"
COMMANDS = {  # of the lessons; each ends in a line that shows its stage
    "s4": ("4 --kv-cache-tokens 2048", "4 --kv-cache-tokens 256 --max-model-len 256"),
    "s5": (f'5 --n 4 "{KING} youngest was"', f'5 --n 4 "{KING} youngest"'),
    "s6": (f'6 --max-num-seqs 1 "{KING} eldest" "{KING} youngest"',),
    "s7": (f"7 {SCARCE} --offload-policy recompute", f"7 {SCARCE} --offload-policy load"),
}
STORY_WIDTH, STORY_END = 100, 38  # characters of a story that README.md shows, and of its end
NUM_ROUNDS = 3
PEER_TOKENS, PEER_TURNS = 128, 5


VARIANTS: dict[str, dict[str, Any]] = {  # options of a stage, which the label begins with
    "s1, max_model_len each": {"reservation": "max_model_len"},
    "s1, prompt + max_tokens": {"reservation": "request"},
    "s2, blocks of 16": {},
    "s3, tiles of blocks": {},
    "s4, no promises": {},
    "s5, shared blocks": {},
    "s6, prefix cache": {},
    "s7, host pool": {},
}
OVERHEAD = ("s4, no promises", "s5, shared blocks", "s6, prefix cache", "s7, host pool")


def measure(args: Namespace) -> dict[str, Any]:
    """Measure the table, and the overhead of each later stage. About two minutes."""
    serve(VARIANTS, num_requests=2)  # warms up
    rows: list[dict[str, Scores]] = []
    gains: dict[str, list[float]] = {}
    for number in range(NUM_ROUNDS):
        racers = serve(VARIANTS, title=f"stages, round {number + 1} of {NUM_ROUNDS}")
        rows.append({label: row_of(label, racer) for label, racer in racers.items()})
        for before, after in itertools.pairwise(OVERHEAD):
            gain = speed_over(racers[before], racers[after])
            gains.setdefault(f"{stage_of(after)}_over_{stage_of(before)}", []).append(gain)
    overhead = {key: {"rounds": NUM_ROUNDS, **Spread.of(each).named("ratio")} for key, each in gains.items()}
    return {"scoreboard": median_scores(rows), "overhead": overhead}


def serve(labels: Iterable[str], num_requests: int = 32, title: str | None = None) -> dict[str, Racer]:
    """Let every variant serve the mixed workload, all side by side."""
    tasks, options = mixed_tasks(4096, num_requests), {"dtype": "float32", "kv_cache_tokens": POOL_TOKENS}
    llms = {label: stage(stage_of(label)).LLM(STORYTELLER, **options, **VARIANTS[label]) for label in labels}
    racers = {label: Racer(stage_of(label), llm, tasks) for label, llm in llms.items()}
    race(racers, title)
    return racers


def speed_over(before: Racer, after: Racer) -> float:
    """Return the speedup of `after`, the median over the slices, in which both do the same work."""
    assert before.num_steps == after.num_steps, f"{before.num_steps} and {after.num_steps} steps"
    return statistics.median(a / b for a, b in zip(before.slices, after.slices, strict=True))


def stage_of(label: str) -> str:
    return label.split(",")[0]


def row_of(label: str, racer: Racer) -> Scores:
    """Return the scores of a run that is over, the pool's bytes at its peak, and the blocks that moved."""
    name, llm, scores = stage_of(label), racer.llm, racer.scores()
    row = {"seats": racer.seats}
    row |= {key: scores[key] for key in ("steps", "tokens_computed", "tokens_per_second", "first_token_seconds")}
    peak, size = llm.peak, llm.kv_cache.bytes_per_token
    row |= {f"{part}_bytes": getattr(peak, part) * size for part in ("promised", "held", "used", "wasted")}
    if name in ("s5", "s6", "s7"):
        row["blocks_copied"] = llm.kv_cache.num_blocks_copied
    return row | (blocks_moved(llm.llm_engine.host_tier) if name == "s7" else {})


# ---- the output of commands


def measure_run(args: Namespace) -> dict[str, Any]:
    """Return a story of stages 1 and 2, and the last line of commands that the lessons show."""
    lessons = {name: "\n\n".join(map(last_line, commands)) for name, commands in COMMANDS.items()}
    return {"run": {"screen": "\n\n".join(screen(number) for number in ("1", "2")), "lessons": lessons}}


def last_line(command: str) -> str:
    """Return `python -m stages ...` as a lesson shows it: the command, and the last line of its output."""
    return f"$ python -m stages {command}\n...\n{output_of(*shlex.split(command)).splitlines()[-1]}"


def output_of(number: str, *argv: str) -> str:
    """Return the output of a stage's command, without errors."""
    command = importlib.import_module("stages.__main__")
    for _ in range(2):  # the first run in a process also waits for torch to initialize
        captured = io.StringIO()
        with contextlib.redirect_stdout(captured):
            command.main([number, "--model", str(STORYTELLER), *argv])
    return captured.getvalue().strip()


def screen(number: str) -> str:
    """Return a stage's `make run` as README.md shows it: the command, both ends of the story, the last line."""
    story, *_, last = output_of(number, RUN_PROMPT).split("\n\n")
    return "\n".join([f'$ make run STAGE={number} PROMPT="{RUN_PROMPT}"', ends(story), last.strip()])


def ends(story: str) -> str:
    """Return the beginning and the end of a text, on one line.

    >>> ends("The fox ran to the henhouse, and the hens saw him. " * 3 + " [40 tokens, length]")
    'The fox ran to the henhouse, and the hens saw him. The fox ... hens saw him.  [40 tokens, length]'
    """
    line = story.replace("\n", " ")
    beginning = line[: STORY_WIDTH - STORY_END].rsplit(" ", 1)[0]
    ending = line[-STORY_END:].split(" ", 1)[1]
    return f"{beginning} ... {ending}"


def measure_peers(args: Namespace) -> dict[str, Any]:
    """Decode a single stream in float32 with stage 1 and with transformers' `generate`, which take turns."""
    from transformers import LlamaForCausalLM

    llm = stage("s1").LLM(STORYTELLER, dtype="float32")
    peer = LlamaForCausalLM.from_pretrained(STORYTELLER, dtype=torch.float32)
    task = mixed_tasks(llm.model_config.vocab_size)[1]._replace(num_output_tokens=PEER_TOKENS)
    options = {"do_sample": False, "max_new_tokens": PEER_TOKENS, "eos_token_id": None, "pad_token_id": 0}
    ours = timed(partial(llm.generate, [task.prompt], sampling_params("s1", task)))
    theirs = timed(partial(peer.generate, torch.tensor([task.prompt]), **options))
    own, other = "ours_tokens_per_second", "transformers_tokens_per_second"
    calls = {own: lambda: PEER_TOKENS / ours(), other: lambda: PEER_TOKENS / theirs()}
    rounds, turns = until_steady(calls, with_spreads, least=PEER_TURNS, most=4 * PEER_TURNS, title="transformers")
    lengths = {"prompt_tokens": len(task.prompt), "output_tokens": PEER_TOKENS}
    return {"peers": {**lengths, **with_spreads(rounds), **ratio(rounds, own, other).named("ratio"), "turns": turns}}
