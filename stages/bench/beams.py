"""The beams table: four outputs of one prompt, as requests, as samples and as beams. Of more_beams.

`story` and `long`: after a short prompt and after one of 200 tokens. Blocks, copies and tokens are counted, and a step
is timed, in turns. `texts`: how likely the outputs after the short prompt are, and how often they repeat themselves.
"""

from argparse import Namespace
from collections.abc import Callable, Mapping
from functools import partial
from itertools import pairwise
from typing import Any

from nanovllm.bench.harness import Rounds, Scores, ratio, seconds_of, with_spreads
from stages.bench.engines import stage
from stages.bench.models import STORYTELLER
from stages.bench.results import machine
from stages.bench.steady import until_steady
from stages.bench.workloads import even_prompt

BRANCH, WIDTH, OUTPUT, BLOCK_SIZE = "more_beams", 4, 64, 16
TIMED_OUTPUT, LEAST_TURNS, MOST_TURNS = 16, 5, 20  # so that all turns take a minute or two
PROMPTS: Mapping[str, str | list[int]] = {"story": "Once upon a time there was a princess", "long": even_prompt(200)}
Call = Callable[[Any], list[Any]]  # of an LLM: returns its outputs


def measure(args: Namespace) -> dict[str, Any]:
    """Count and time the outputs of both prompts."""
    result = counted()
    for name, prompt in PROMPTS.items():
        times = timed(prompt, name)
        for way, each in times.pop("ways").items():
            result[name][way] |= each
        result[name] |= times
    return {"beams": {"machine": machine(), **result}}


def ways_of(prompt: str | list[int], num_tokens: int) -> dict[str, Call]:
    """Return calls for outputs of a prompt: one beam, which is greedy, and WIDTH requests, samples and beams."""
    branch = stage(BRANCH)
    search = partial(branch.BeamSearchParams, max_tokens=num_tokens, ignore_eos=True)
    seeds = [branch.SamplingParams(seed=seed, max_tokens=num_tokens, ignore_eos=True) for seed in range(WIDTH)]
    samples = branch.SamplingParams(n=WIDTH, seed=0, max_tokens=num_tokens, ignore_eos=True)
    return {
        "alone": lambda llm: llm.beam_search([prompt], search(1)),
        "requests": lambda llm: llm.generate([prompt] * WIDTH, seeds),
        "samples": lambda llm: llm.generate([prompt], samples),
        "beams": lambda llm: llm.beam_search([prompt], search(WIDTH)),
    }


def new_llm() -> Any:
    return stage(BRANCH).LLM(STORYTELLER, dtype="float32", block_size=BLOCK_SIZE, kv_cache_tokens=8192)


# ---- counted


def counted() -> dict[str, dict[str, Any]]:
    """Return the counts of both prompts, and what the outputs of the short one are like."""
    result: dict[str, dict[str, Any]] = {}
    for name, prompt in PROMPTS.items():
        outputs, counts = {}, {}
        for way, call in ways_of(prompt, OUTPUT).items():
            llm = new_llm()
            outputs[way], counts[way] = call(llm), counts_of(llm)
        held = counts["beams"]["blocks"] / counts["alone"]["blocks"]
        result[name] = {**counts, "times": held, "output_tokens": OUTPUT}
        if name == "story":
            texts = {way: likeliest(outputs[way]) for way in ("alone", "samples", "beams")}
            result["texts"] = {**texts, "num_pairs": OUTPUT - 1}
    return result


def counts_of(llm: Any) -> dict[str, int]:
    counts = {"steps": llm.model_runner.num_steps, "tokens_computed": llm.model_runner.num_tokens}
    return counts | {"blocks": llm.peak.held // BLOCK_SIZE, "blocks_copied": llm.kv_cache.num_blocks_copied}


def likeliest(outputs: list[Any]) -> dict[str, Any]:
    """Return the logprob of the likeliest completion, how many pairs of tokens it repeats, and its last words."""
    completions = [completion for output in outputs for completion in output.outputs]
    best = max(completions, key=lambda completion: completion.cumulative_logprob)
    pairs = [*pairwise(best.token_ids)]
    repeated, end = len(pairs) - len({*pairs}), " ".join(best.text.split()[-7:])
    return {"logprob": round(best.cumulative_logprob, 2), "repeated": repeated, "end": end}


# ---- timed


def timed(prompt: str | list[int], title: str) -> Scores:
    """Return the milliseconds of a step, by way, and how many times as long one of beams takes as one of samples."""
    calls = {way: partial(milliseconds, new_llm(), call) for way, call in ways_of(prompt, TIMED_OUTPUT).items()}

    def cost(rounds: Rounds[str]) -> Scores:
        return ratio(rounds, "beams", "samples").named("cost")

    rounds, turns = until_steady(calls, cost, least=LEAST_TURNS, most=MOST_TURNS, title=title)
    ways = {way: with_spreads([{"step_ms": each[way]} for each in rounds]) for way in calls}
    return {"ways": ways, **cost(rounds), "turns": turns}


def milliseconds(llm: Any, call: Call) -> float:
    """Return the milliseconds of a step of one call."""
    before = llm.model_runner.num_steps
    return 1000 * seconds_of(partial(call, llm)) / (llm.model_runner.num_steps - before)
