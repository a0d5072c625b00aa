"""The scoreboard: what each stage buys and what it costs, on one workload and the shipped checkpoint.

All stages serve the 32 requests side by side, a slice at a time. A row has the pool's bytes when most of it was used,
the speed, the steps, the tokens through the model, and the blocks copied, stored and loaded. `overhead` is of the same
rounds: nobody forks, shares or is preempted there, so it is what stages 5 to 7 cost those who do not need them.
`run` is what `make run` shows, `peers` compares one sequence with transformers.
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
from typing import Any, NamedTuple

import torch

from stages.bench.engines import stage
from stages.bench.harness import Scores, Spread, median_scores, ratio, seconds_of, take_turns, with_spreads
from stages.bench.models import STORYTELLER
from stages.bench.racing import Racer, race, sampling_params
from stages.bench.workloads import mixed_workload

POOL_TOKENS = 8192
RUN_PROMPT = "Once upon a time"
KING = "Once upon a time there was a king who had three sons, and the"  # with one word more: longer than a block
SCARCE = "--kv-cache-tokens 512 --max-model-len 256"
COMMANDS = {  # of the lessons, each ends in a line that shows its stage
    "s4": ("4 --kv-cache-tokens 2048", "4 --kv-cache-tokens 256 --max-model-len 256"),
    "s5": (f'5 --n 4 "{KING} youngest was"', f'5 --n 4 "{KING} youngest"'),
    "s6": (f'6 --max-num-seqs 1 "{KING} eldest" "{KING} youngest"',),
    "s7": (f"7 {SCARCE} --offload-policy recompute", f"7 {SCARCE} --offload-policy load"),
}
STORY_WIDTH, STORY_END = 100, 38  # characters of a story that README.md shows, and of its end
NUM_ROUNDS = 3
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
OVERHEAD = ("s4, no promises", "s5, shared blocks", "s6, prefix cache", "s7, host pool")


def measure(args: Namespace) -> dict[str, Any]:
    """The table, and what a later stage costs those who do not need it. About two minutes."""
    serve(VARIANTS, num_requests=2)  # warms up
    pairs = list(itertools.pairwise(OVERHEAD))
    rows: list[dict[str, Scores]] = []
    ratios: list[dict[str, float]] = []
    for number in range(NUM_ROUNDS):
        racers = serve(VARIANTS, title=f"stages, round {number + 1} of {NUM_ROUNDS}")
        rows.append({variant.label: row_of(variant, racers[variant.label]) for variant in VARIANTS})
        ratios.append({after: speed_over(racers[before], racers[after]) for before, after in pairs})
    overhead = {}
    for before, after in pairs:
        found = Spread.of([each[after] for each in ratios])._asdict()
        overhead[f"{after.split(',')[0]}_over_{before.split(',')[0]}"] = {"rounds": NUM_ROUNDS, **found}
    return {"scoreboard": median_scores(rows), "overhead": overhead}


def serve(variants: Iterable[Variant], num_requests: int = 32, title: str | None = None) -> dict[str, Racer]:
    """One round: every variant serves the mixed workload, all side by side."""
    return race({variant.label: partial(racer_of, variant, num_requests) for variant in variants}, title)


def speed_over(before: Racer, after: Racer) -> float:
    """How many times as fast `after` is, the median of the slices: both do the same work in each of them."""
    assert before.scores()["steps"] == after.scores()["steps"], "another number of steps"
    return statistics.median(a / b for a, b in zip(before.slices, after.slices, strict=True))


def racer_of(variant: Variant, num_requests: int) -> Racer:
    requests = mixed_workload(4096, num_requests)
    options = {"dtype": "float32", "kv_cache_tokens": POOL_TOKENS, **variant.options}
    return Racer(variant.name, STORYTELLER, requests, **options)


def row_of(variant: Variant, racer: Racer) -> Scores:
    """What a run that is over has shown."""
    shown = ("steps", "tokens_computed", "tokens_per_second", "first_token_seconds")
    scores = {name: number for name, number in racer.scores().items() if name in shown}
    return {"seats": racer.seats, **scores, **peak_bytes(racer.llm), **blocks_moved(variant.name, racer.llm)}


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
        tier = llm.llm_engine.host_tier
        moved |= {"blocks_stored": tier.num_blocks_stored, "blocks_loaded": tier.num_blocks_loaded}
    return moved


def measure_run(args: Namespace) -> dict[str, Any]:
    """What commands print: a story in stages 1 and 2, and the last line where a lesson shows it."""
    lessons = {name: "\n\n".join(map(last_line, commands)) for name, commands in COMMANDS.items()}
    return {"run": {"screen": "\n\n".join(screen(number) for number in ("1", "2")), "lessons": lessons}}


def last_line(command: str) -> str:
    """What a lesson shows of `python -m stages ...`: the command, and the line that it ends in."""
    return f"$ python -m stages {command}\n...\n{told(*shlex.split(command)).splitlines()[-1]}"


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
    return {"peers": {**lengths, **with_spreads(pairs), **ratio(pairs, "ours", "transformers")._asdict()}}
