"""What each stage buys and what it costs, on one workload and the shipped checkpoint: `python -m stages.scoreboard`.

It runs every stage present, prints one table, writes stages/results.json and brings the READMEs' numbers up to date: in
under two minutes on two cores. --predict answers the lessons' questions instead, --peers compares with transformers,
--all does these and measures decode steps (`python -m stages.decode`) as well. Other measurements have commands of
their own: stages.serving, stages.sharing, stages.swapping.
"""

import contextlib
import importlib
import io
import json
import platform
import statistics
import textwrap
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

import click
import torch
from tqdm import tqdm

from stages import decode, figures, predict, tables
from stages.predict.s1 import holes
from stages.workload import mixed_workload

MODEL = figures.ROOT / "models" / "storyteller"
POOL_TOKENS = 8192
MOST_ROUNDS, SECONDS = 3, 90  # of the table: as many rounds as fit in the time, at least one
PEER_TOKENS, PEER_PAIRS = 128, 5


class Variant:
    """A stage with the options that it is run with; most stages have one."""

    def __init__(self, label: str, package: str, **options: Any) -> None:
        self.label, self.package, self.options = label, package, options

    def module(self) -> ModuleType:
        return importlib.import_module(self.package)


VARIANTS = [
    Variant("s1, max_model_len each", "stages.s1_contiguous_cache", reservation="max_model_len"),
    Variant("s1, prompt + max_tokens", "stages.s1_contiguous_cache", reservation="request"),
    Variant("s2, blocks of 16", "stages.s2_block_manager"),
    Variant("s3, tiles of blocks", "stages.s3_paged_attention"),
    Variant("s4, no promises", "stages.s4_continuous_batching"),
    Variant("s5, shared blocks", "stages.s5_cow_sampling"),
    Variant("s6, prefix cache", "stages.s6_prefix_caching"),
    Variant("s7, host pool", "stages.s7_cpu_offload"),
]


def score(variant: Variant, num_requests: int = 32) -> dict[str, Any]:
    """One run of the mixed workload: bytes of the pool at its peak, speed, steps, tokens through the model."""
    stage = variant.module()
    llm = stage.LLM(MODEL, dtype="float32", kv_cache_tokens=POOL_TOKENS, **variant.options)
    requests = mixed_workload(llm.model_config.vocab_size, num_requests)
    params = [stage.SamplingParams(temperature=0.0, max_tokens=r.num_output_tokens, ignore_eos=True) for r in requests]
    started = time.perf_counter()
    seats, finished = Counter[int](), []
    for output in llm.stream([r.prompt_token_ids for r in requests], params):
        seats[llm.model_runner.num_steps] += 1  # an output for each sequence of a step
        if output.finished:
            finished.append(output)
    seconds = time.perf_counter() - started
    num_tokens = sum(len(output.outputs[0].token_ids) for output in finished)
    assert num_tokens == sum(r.num_output_tokens for r in requests), "a request ended early"
    waits = [output.metrics.first_token_time - output.metrics.arrival_time for output in finished]
    return {
        "seats": max(seats.values()),
        "steps": llm.model_runner.num_steps,
        "tokens_computed": llm.model_runner.num_tokens,
        "tokens_per_second": num_tokens / seconds,
        "first_token_seconds": statistics.median(waits),
        **peak_bytes(llm),
        **({"blocks_copied": llm.kv_cache.num_blocks_copied} if hasattr(llm.kv_cache, "num_blocks_copied") else {}),
        **blocks_swapped(llm),
    }


def blocks_swapped(llm: Any) -> dict[str, int]:
    """Both ways; nothing before stage 7."""
    host = getattr(getattr(llm, "llm_engine", None), "host_pool", None)
    return {"blocks_swapped": host.stored.num_blocks + host.loaded.num_blocks} if host else {}


def peak_bytes(llm: Any) -> dict[str, int]:
    """The pool when most of it was used."""
    slots = {name: getattr(llm.peak, name) for name in ("promised", "held", "used", "wasted")}
    return {f"{name}_bytes": number * llm.kv_cache.bytes_per_token for name, number in slots.items()}


def compare_with_transformers() -> dict[str, Any]:
    """Single-stream decode in float32, stage 1 and transformers' `generate` in turn; the ratio of each pair."""
    from transformers import LlamaForCausalLM

    stage = VARIANTS[0].module()
    llm = stage.LLM(MODEL, dtype="float32")
    peer = LlamaForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    prompt = mixed_workload(llm.model_config.vocab_size)[1].prompt_token_ids
    params = stage.SamplingParams(temperature=0.0, max_tokens=PEER_TOKENS, ignore_eos=True)
    options = {"do_sample": False, "max_new_tokens": PEER_TOKENS, "eos_token_id": None, "pad_token_id": 0}
    ours = partial(llm.generate, [prompt], params)
    theirs = partial(peer.generate, torch.tensor([prompt]), **options)
    pairs = [(tokens_per_second(ours), tokens_per_second(theirs)) for _ in tqdm(range(PEER_PAIRS + 1), "transformers")]
    pairs = pairs[1:]  # the first warms up
    return {
        "prompt_tokens": len(prompt),
        "output_tokens": PEER_TOKENS,
        "ours": statistics.median(ours for ours, _ in pairs),
        "transformers": statistics.median(theirs for _, theirs in pairs),
        "ratio": statistics.median(ours / theirs for ours, theirs in pairs),
    }


def tokens_per_second(generate: Callable[[], Any]) -> float:
    started = time.perf_counter()
    generate()
    return PEER_TOKENS / (time.perf_counter() - started)


def screen() -> dict[str, str]:
    """What the README's `make run` shows: the first story, an ellipsis for the others, the last line."""
    finished = importlib.import_module("nanovllm.__main__")
    captured = io.StringIO()
    with contextlib.redirect_stdout(captured):
        finished.main(["generate", "--model", str(MODEL)])
    first, *_, last = captured.getvalue().strip().split("\n\n")
    wrapped = "\n".join(textwrap.fill(line, 100) for line in first.splitlines())
    return {"screen": f"{wrapped}\n\n...\n\n{last.strip()}"}


def machine(dtype: str = "float32") -> str:
    """The machine in words, for the tables, and what it computed in."""
    cores, instructions = torch.get_num_threads(), f"{platform.machine()}, {torch.backends.cpu.get_cpu_capability()}"
    return f"{cores} core{'s' * (cores > 1)} ({instructions}), torch {torch.__version__.split('+')[0]}, {dtype}"


def save(results: dict[str, Any]) -> None:
    """Merge into results.json, so that one part can be measured again alone, and refresh the prose.

    With a "machine": the parts that name none of their own are compared with each other, so if the others are from
    another machine a line says so, and nothing is written. Without: each part names its own.
    """
    path = figures.ROOT / figures.RESULTS
    old = json.loads(path.read_text("utf-8")) if path.exists() else {}
    others = [name for name in old.keys() - results.keys() if "machine" not in old[name]]
    if "machine" in results and others and old["machine"] != results["machine"]:
        here, there = results["machine"], old["machine"]
        click.echo(f"not written: the other figures were measured on {there}, and this is {here}", err=True)
        return
    path.write_text(json.dumps(old | results, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    for name in figures.write():
        print(f"{name} brought up to date")


def has_time(num_rounds: int, seconds: float) -> bool:
    """Whether there is to be one more round, if it takes as long as those before.

    >>> has_time(0, 0.0), has_time(1, 40.0), has_time(1, 60.0), has_time(3, 20.0)
    (True, True, False, False)
    """
    return num_rounds < MOST_ROUNDS and seconds + seconds / max(num_rounds, 1) <= SECONDS


def median_scores() -> dict[str, Any]:
    """Each variant's score, run in turn; the speeds are medians. A few requests each warm up and are not counted."""
    for variant in VARIANTS:
        score(variant, num_requests=2)
    rounds: list[dict[str, Any]] = []
    started = time.perf_counter()
    while has_time(len(rounds), time.perf_counter() - started):
        rounds.append({v.label: score(v) for v in tqdm(VARIANTS, f"stages, round {len(rounds) + 1}")})
    return {
        v.label: {key: statistics.median(scores[v.label][key] for scores in rounds) for key in rounds[0][v.label]}
        for v in VARIANTS
    }


@click.command()
@click.option("--predict", "only_predict", is_flag=True, help="only the answers to the lessons' questions")
@click.option("--peers", "only_peers", is_flag=True, help="only the comparison with transformers")
@click.option("--all", "everything", is_flag=True, help="the table, both of these, and decode steps: some five minutes")
def main(only_predict: bool, only_peers: bool, everything: bool) -> None:
    """Measure every stage present and write the results where the READMEs take them from."""
    results: dict[str, Any] = {"machine": machine()}
    if everything or not (only_predict or only_peers):
        results["scoreboard"] = median_scores()
        results["run"] = screen()
    if everything:
        results["decode"] = decode.everything()
    if everything or only_peers:
        results["peers"] = compare_with_transformers()
    if everything or only_predict:
        results["predict"] = predict.answers(MODEL)
        results["holes"] = holes(MODEL)
        for entry in (entry for stage in results["predict"].values() for entry in stage["answers"]):
            print(f"{entry['question']}\n  {entry['answer']}")
    if "scoreboard" in results:
        print(tables.scoreboard_block(results))
    save(results)


if __name__ == "__main__":
    main()
