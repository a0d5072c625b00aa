"""What an engine made of a job: its tokens, and when each came. The same numbers are drawn from every engine's."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from ...engine.sampling_params import RequestOutputKind, SamplingParams
from ...llm import LLM
from .timing import IDS
from .workload import Task


@dataclass(frozen=True)
class Answer:
    """Times are in seconds since the job began. Engines measure them by themselves: what is sent costs nobody."""

    tokens: list[list[int]]
    times: list[list[float]]
    idle_cpu_seconds: float = 0.0  # of the processor, between the job before and this one

    @property
    def seconds(self) -> float:
        return max(each[-1] for each in self.times if each)

    @property
    def tokens_per_second(self) -> float:
        return sum(map(len, self.tokens)) / self.seconds

    @property
    def decode_seconds(self) -> float:
        """From the moment at which every request has its first token."""
        return self.seconds - self._all_began

    @property
    def decoded_per_second(self) -> float:
        return sum(when > self._all_began for each in self.times for when in each) / self.decode_seconds

    @property
    def step_seconds(self) -> float:
        """
        >>> Answer([[5, 6, 7], [8, 9, 4]], [[1.0, 1.5, 2.0], [1.0, 1.5, 2.0]]).step_seconds
        0.5
        """
        return self.decode_seconds / (max(map(len, self.tokens)) - 1)

    @property
    def _all_began(self) -> float:
        return max(each[0] for each in self.times)

    def fault(self, tasks: list[Task], may_be_cut: bool = False) -> str | None:
        """What is wrong with it as an answer to these tasks. One that was cut has fewer tokens of some."""
        asked, got = [task.num_tokens for task in tasks], [len(each) for each in self.tokens]
        due = list(map(min, got, asked)) if may_be_cut and len(got) == len(asked) else asked
        if got != due:
            number = next((i for i, pair in enumerate(zip(got, due, strict=False)) if pair[0] != pair[1]), len(got))
            return f"other numbers of tokens than were asked for, first at request {number} of {len(asked)}"
        if [len(each) for each in self.times] != got or any(each != sorted(each) for each in self.times):
            return "times that are not one for each token, in order"
        return None


class Job(NamedTuple):
    """Its speed is that of the whole, or of the decoding alone."""

    name: str
    tasks: list[Task]
    is_decode: bool

    def speed(self, answer: Answer) -> float:
        return answer.decoded_per_second if self.is_decode else answer.tokens_per_second

    def seconds(self, answer: Answer) -> float:
        return answer.decode_seconds if self.is_decode else answer.seconds

    @property
    def num_steps(self) -> int:
        """At least: if all requests run in every step until they end. A prompt's step is one of them."""
        return max(task.num_tokens for task in self.tasks) - self.is_decode

    def shortened(self, num_tokens: int) -> list[Task]:
        return [Task(task.prompt, min(task.num_tokens, num_tokens)) for task in self.tasks]


Serve = Callable[[list[Task]], Answer]


def serve_here(llm: LLM, tasks: list[Task]) -> Answer:
    """This engine's answer. Nothing of an earlier job is found in the cache. Raises ValueError if a request fails."""
    assert llm.reset_prefix_cache(), "a request runs"
    engine, answer, numbers = llm.llm_engine, Answer([[] for _ in tasks], [[] for _ in tasks]), dict[str, int]()
    started = time.perf_counter()
    for number, task in enumerate(tasks):
        engine.add_request(id := next(IDS), task.prompt, as_deltas(task))
        numbers[id] = number
    while engine.has_unfinished_requests():
        outputs = engine.step()
        now = time.perf_counter() - started
        for output in outputs:
            if output.error:
                raise ValueError(f"a request could not be served: {output.error}")
            new = output.outputs[0].token_ids
            answer.tokens[numbers[output.request_id]] += new
            answer.times[numbers[output.request_id]] += [now] * len(new)
    assert not (fault := answer.fault(tasks)), fault
    return answer


def as_deltas(task: Task) -> SamplingParams:
    """Token ids alone, each told once: what the peers are asked for too."""
    return SamplingParams(
        temperature=task.temperature,
        max_tokens=task.num_tokens,
        ignore_eos=True,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
    )
