"""Engines that serve requests: side by side, a slice of the work at a time, each on a clock of its own; or alone."""

import statistics
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from stages.bench.engines import WITHOUT_SCHEDULER, stage
from stages.bench.harness import Scores, take_turns
from stages.bench.workloads import Request

SLICES = 100


class Racer:
    """A stage that serves the requests. It runs only when it is told to; its clock stands still meanwhile."""

    def __init__(self, name: str, folder: Path, requests: list[Request], **options: Any) -> None:
        """`options` are EngineConfig's."""
        self.llm = stage(name).LLM(folder, **options)
        self._before = (
            self.llm.model_runner.num_steps,
            self.llm.model_runner.num_tokens,
        )  # stage 7 has measured prefills
        self._num_scheduled = sum(request.n * request.num_output_tokens for request in requests)
        made = [sampling_params(name, request) for request in requests]
        self._stream = self.llm.stream([request.prompt_token_ids for request in requests], made)
        self._so_far: dict[str, int] = {}  # tokens of each request
        self._first_tokens: dict[str, float] = {}  # when each request got it, on this clock
        self._num_tokens, self._num_slices = 0, 0
        self.slices: list[float] = []  # the seconds of each
        self._seats = Counter[int]()  # of each step

    def next_slice(self) -> float:
        """Serve one of SLICES parts of the tokens; returns its seconds."""
        self._num_slices += 1
        target = self._num_scheduled * self._num_slices // SLICES
        started = time.perf_counter()
        while self._num_tokens < target:
            output = next(self._stream)
            self._seats[self.llm.model_runner.num_steps] += 1  # an output for each request of a step
            num_tokens = sum(len(sample.token_ids) for sample in output.outputs)
            self._num_tokens += num_tokens - self._so_far.get(output.request_id, 0)
            self._so_far[output.request_id] = num_tokens
            self._first_tokens.setdefault(output.request_id, sum(self.slices) + time.perf_counter() - started)
        seconds = time.perf_counter() - started
        self.slices.append(seconds)
        return seconds

    @property
    def num_steps(self) -> int:
        return self.llm.model_runner.num_steps - self._before[0]

    @property
    def num_computed_tokens(self) -> int:
        return self.llm.model_runner.num_tokens - self._before[1]

    @property
    def seats(self) -> int:
        """The most requests that got a token in one step."""
        return max(self._seats.values())

    def scores(self) -> Scores:
        """Raises if a request is not served to its end."""
        assert self._num_tokens == self._num_scheduled, f"{self._num_tokens} of {self._num_scheduled} tokens came"
        assert next(self._stream, None) is None, "there are more tokens than were asked for"
        return {
            "tokens_per_second": self._num_tokens / sum(self.slices),
            "seconds": sum(self.slices),
            "steps": self.num_steps,
            "tokens_a_step": self._num_tokens / self.num_steps,
            "tokens_computed": self.num_computed_tokens,
            "first_token_seconds": statistics.median(self._first_tokens.values()),
        }


def sampling_params(name: str, request: Request) -> Any:
    """Greedy, or, of several samples, with a seed; exactly as many tokens as were asked for."""
    options: dict[str, Any] = {"temperature": 0.0} if request.n == 1 else {"n": request.n, "seed": 0}
    return stage(name).SamplingParams(max_tokens=request.num_output_tokens, ignore_eos=True, **options)


def serve(name: str, engine: Any, requests: Sequence[Request]) -> None:
    """Add the requests to an LLMEngine of stage `name`, all at once, and step until they have finished."""
    for number, request in enumerate(requests):
        engine.add_request(str(number), request.prompt_token_ids, sampling_params(name, request))
    while engine.has_unfinished_requests():
        engine.step()


def race(racers: Mapping[str, Callable[[], Racer]], title: str | None = None) -> dict[str, Racer]:
    """All of them, made anew, at the finish."""
    started = {name: make() for name, make in racers.items()}
    take_turns({name: racer.next_slice for name, racer in started.items()}, SLICES, warm_ups=0, title=title)
    return started


def computed_twice(name: str, tokens_computed: float, requests: list[Request]) -> int:
    """Tokens that went through the model beyond those that had to, if nothing is shared between requests.

    The last token of a sample is never computed. Until stage 4 a sample computes the prompt itself; from stage 5 on
    the samples of a request compute it once, but for its last token, which each computes by itself.
    """
    assert name not in WITHOUT_SCHEDULER, "nobody is preempted there"
    needed = sum(len(r.prompt_token_ids) - 1 + r.n * r.num_output_tokens for r in requests)
    return int(tokens_computed) - needed
