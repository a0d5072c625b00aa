"""Stage 1: the gain of a cache, and how it fills a pool."""

import itertools
import statistics
import time
from pathlib import Path
from typing import Any, NamedTuple

from nanovllm.bench.harness import Scores, Spread, ratio, take_turns
from nanovllm.bench.workload import Task
from stages import s1_contiguous_cache as s1
from stages.bench.engines import silent
from stages.bench.racing import sampling_params
from stages.bench.replay import Moment, admitted, arrivals, replay
from stages.bench.workloads import traffic
from stages.s1_contiguous_cache.input_processor import InputProcessor
from stages.s1_contiguous_cache.llama import ModelConfig
from stages.s1_contiguous_cache.slot_manager import SlotManager

DECODE_STEPS = 24


def measure(model: Path) -> Scores:
    """Return the gain of the cache, the cost of more tokens and sequences, and the seats of a pool."""
    llm = s1.LLM(model, dtype="float32")
    tokens = {count: lambda count=count: run(llm, [count]).prefill for count in (8, 1)}
    sequences = {count: lambda count=count: run(llm, [64] * count).decode for count in (8, 1)}
    return {
        **cache_gain(llm, 16).named("cache_at_16"),
        **cache_gain(llm, 990).named("cache_at_990"),
        **ratio(take_turns(tokens, 9), 8, 1).named("cost_of_8_tokens"),
        **ratio(take_turns(sequences, 5), 8, 1).named("cost_of_8_sequences"),
        "seats": seats_in(8192, llm),
    }


def derived(numbers: Scores) -> dict[str, Any]:
    return {}


class StepSeconds(NamedTuple):
    """The duration of a run's steps, in seconds."""

    prefill: float
    decode: float  # the median


def run(llm: s1.LLM, prompt_lengths: list[int]) -> StepSeconds:
    """Serve one batch of prompts of these lengths for a few steps."""
    params = sampling_params("s1", Task([], DECODE_STEPS + 1))
    prompts = [[3 + i % 1000 for i in range(length)] for length in prompt_lengths]
    ends = [time.perf_counter()]
    for number, _ in enumerate(llm.stream(prompts, params), start=1):
        if number % len(prompts) == 0:  # every sequence has its token: a step has ended
            ends.append(time.perf_counter())
    steps = [after - before for before, after in itertools.pairwise(ends)]
    return StepSeconds(prefill=steps[0], decode=statistics.median(steps[1:]))


def cache_gain(llm: s1.LLM, position: int) -> Spread:
    """Return the time of a token at `position` without a cache, relative to the time with it, in five pairs.

    Without a cache the whole text is computed again, which costs as much as a prefill of `position` tokens.
    """
    runs = [run(llm, [position]) for _ in range(5)]
    return Spread.of([seconds.prefill / seconds.decode for seconds in runs])


def seats_in(num_slots: int, llm: s1.LLM) -> int:
    """Return how many sequences SlotManager admits when each reserves max_model_len slots."""
    inputs = InputProcessor(llm.model_config, None, llm.max_model_len, seed=0)
    manager = SlotManager(num_slots, "max_model_len", llm.max_model_len, silent("s1"))
    sequences = (inputs.process(str(number), [1], s1.SamplingParams()) for number in itertools.count())
    return admitted(manager, sequences, SlotManager.can_allocate)


# ---- holes


def holes(model: Path) -> dict[str, float]:
    """Return how often first fit refuses a request although enough slots are free, in part 3 of the notebook.

    `refused` is the share of such steps; the other numbers describe the step with the most slots to spare.
    """
    moments = crowded_moments(model)
    worst = most_free(moments)
    return {
        "needed": worst.waiting.max_num_tokens,
        "free": num_free(worst),
        "largest_free": worst.report.largest_free,
        "refused": sum(is_refused(moment) for moment in moments) / len(moments),
    }


def crowded_moments(model: Path) -> list[Moment]:
    """Return the traffic's steps after the pool has filled up."""
    pool, longest = 8192, 1024
    manager = SlotManager(pool, "request", longest, silent("s1"))
    requests = arrivals("s1", ModelConfig.from_folder(model), traffic(1500, seed=1), longest)
    return replay(manager, requests, 1500, SlotManager.can_allocate)[300:]


def most_free(moments: list[Moment]) -> Moment:
    """Return the moment at which a request is refused with the most slots to spare."""
    return max(filter(is_refused, moments), key=lambda moment: num_free(moment) - moment.waiting.max_num_tokens)


def is_refused(moment: Moment) -> bool:
    """Return whether the waiting request would fit if the free slots were contiguous."""
    return bool(num_free(moment) >= moment.waiting.max_num_tokens)


def num_free(moment: Moment) -> int:
    """Return the free slots."""
    return int(moment.report.num_slots - moment.report.held)
