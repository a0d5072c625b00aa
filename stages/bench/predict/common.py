"""What the stages' answers are measured with."""

import itertools
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from stages.bench.engines import stage
from stages.bench.harness import Spread, ratio, take_turns
from stages.bench.racing import sampling_params
from stages.bench.workloads import Request

DECODE_STEPS = 24


class Answer(NamedTuple):
    question: str
    answer: str


class StepSeconds(NamedTuple):
    """What one run took, in seconds."""

    prefill: float
    decode: float  # a step, the median


class Shown:
    """Writes numbers into answers: each in a mark that names its key, as in all prose (stages/tools/prose/marks.py).

    >>> Shown("predict.s9", {"cost": {"16": 1.25}})("cost.16", ".1f")
    '<!-- n: predict.s9.cost.16:.1f -->1.2<!-- / -->'
    """

    def __init__(self, prefix: str, numbers: Mapping[str, Any]) -> None:
        """`numbers` stand under the key `prefix` in results.json."""
        self._prefix, self._numbers = prefix, numbers

    def __call__(self, key: str, form: str = "") -> str:
        found: Any = self._numbers
        for part in key.split("."):
            found = found[part]
        name = f"{self._prefix}.{key}" + (f":{form}" if form else "")
        return f"<!-- n: {name} -->{found:{form}}<!-- / -->"


def with_answers(numbers: dict[str, Any], entries: list[Answer]) -> dict[str, Any]:
    """What a stage's `answers` returns."""
    return numbers | {"answers": [entry._asdict() for entry in entries]}


def run(name: str, llm: Any, prompt_lengths: list[int]) -> StepSeconds:
    """Serve one batch of prompts of these lengths for a few steps. `llm` is an LLM of stage `name`."""
    params = sampling_params(name, Request([], DECODE_STEPS + 1))
    prompts = [[3 + i % 1000 for i in range(length)] for length in prompt_lengths]
    ends = [time.perf_counter()]
    for number, _ in enumerate(llm.stream(prompts, params), start=1):
        if number % len(prompts) == 0:  # every sequence got its token: a step has ended
            ends.append(time.perf_counter())
    steps = [after - before for before, after in itertools.pairwise(ends)]
    return StepSeconds(prefill=steps[0], decode=statistics.median(steps[1:]))


def ratio_of(above: Callable[[], float], below: Callable[[], float], rounds: int) -> Spread:
    """above() / below(), in turns."""
    return ratio(take_turns({"above": above, "below": below}, rounds), "above", "below")


def serve(name: str, engine: Any, request_id: str, request: Request) -> Any:
    """The last output of a request that is alone in `engine`, an LLMEngine of stage `name`."""
    engine.add_request(request_id, request.prompt_token_ids, sampling_params(name, request))
    outputs: list[Any] = []
    while engine.has_unfinished_requests():
        outputs = engine.step() or outputs
    return outputs[0]


def llm_of(name: str, model: Any, **options: Any) -> Any:
    """In float32."""
    return stage(name).LLM(model, dtype="float32", **options)
