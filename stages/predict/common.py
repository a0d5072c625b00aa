"""What the stages' answers are measured with."""

import itertools
import statistics
import time
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

DECODE_STEPS = 24


class Answer(NamedTuple):
    question: str
    answer: str


class StepSeconds(NamedTuple):
    """What one run took, in seconds."""

    prefill: float
    decode: float  # a step, the median


def with_answers(numbers: dict[str, Any], entries: list[Answer]) -> dict[str, Any]:
    """What a stage's `answers` returns."""
    return numbers | {"answers": [entry._asdict() for entry in entries]}


def run(stage: ModuleType, llm: Any, prompt_lengths: list[int]) -> StepSeconds:
    """Serve one batch of prompts of these lengths for a few steps. `llm` is an LLM of the package `stage`."""
    params = stage.SamplingParams(temperature=0.0, max_tokens=DECODE_STEPS + 1, ignore_eos=True)
    prompts = [[3 + i % 1000 for i in range(length)] for length in prompt_lengths]
    ends = [time.perf_counter()]
    for number, _ in enumerate(llm.stream(prompts, params), start=1):
        if number % len(prompts) == 0:  # every sequence got its token: a step has ended
            ends.append(time.perf_counter())
    steps = [after - before for before, after in itertools.pairwise(ends)]
    return StepSeconds(prefill=steps[0], decode=statistics.median(steps[1:]))


def median_ratio(above: Callable[[], float], below: Callable[[], float], rounds: int) -> float:
    """The median of above() / below(), called in turn: a slow spell of the machine falls on both."""
    return statistics.median(above() / below() for _ in range(rounds))


def admitted(manager: Any, sequences: Any, admits: Callable[[Any, Any], bool]) -> int:
    """How many sequences a manager lets in, one after the other, before the first that `admits` refuses."""
    for number, seq in enumerate(sequences):
        if not admits(manager, seq):
            return number
        manager.allocate(seq)
    raise AssertionError("a pool that never fills")
