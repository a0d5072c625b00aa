"""Stages that serve the same tasks side by side, a slice of the work at a time, each on a clock of its own."""

import statistics
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from nanovllm.bench.harness import Scores, take_turns
from nanovllm.bench.workload import Task
from stages.bench.engines import WITHOUT_SCHEDULER, stage

SLICES = 100


class Racer:
    """A stage that serves tasks, one slice per call. Its clock stops between calls."""

    def __init__(self, name: str, llm: Any, tasks: Sequence[Task]) -> None:
        """Prepare to serve the tasks with `llm`, an LLM of stage `name`."""
        self.llm = llm
        self._before = llm.model_runner.num_steps, llm.model_runner.num_tokens
        self._num_expected = sum(task.n * task.num_output_tokens for task in tasks)
        self._stream = llm.stream([task.prompt for task in tasks], [sampling_params(name, task) for task in tasks])
        self._lengths = Counter[str]()  # of the outputs so far
        self._seats = Counter[int]()  # outputs of each step
        self.first_tokens: dict[str, float] = {}  # when each request got its first token, on this clock
        self.slices: list[float] = []  # the seconds of each

    def next_slice(self) -> float:
        """Serve one of SLICES parts of the tokens, and return its seconds."""
        target, before = self._num_expected * (len(self.slices) + 1) // SLICES, sum(self.slices)
        started = time.perf_counter()
        while self._lengths.total() < target:
            output = next(self._stream)
            self._seats[self.llm.model_runner.num_steps] += 1  # an output for each request of a step
            self._lengths[output.request_id] = sum(len(sample.token_ids) for sample in output.outputs)
            self.first_tokens.setdefault(output.request_id, before + time.perf_counter() - started)
        self.slices.append(time.perf_counter() - started)
        return self.slices[-1]

    @property
    def num_steps(self) -> int:
        return int(self.llm.model_runner.num_steps - self._before[0])

    @property
    def num_computed_tokens(self) -> int:
        return int(self.llm.model_runner.num_tokens - self._before[1])

    @property
    def seats(self) -> int:
        """The most requests that got a token in one step."""
        return max(self._seats.values())

    def scores(self) -> Scores:
        """Return the numbers of a race that is over. Every task must have all of its tokens."""
        num_tokens, seconds = self._lengths.total(), sum(self.slices)
        assert num_tokens == self._num_expected, f"{num_tokens} of {self._num_expected} tokens generated"
        assert next(self._stream, None) is None, "there are too many tokens"
        times = {"tokens_per_second": num_tokens / seconds, "seconds": seconds}
        times["first_token_seconds"] = statistics.median(self.first_tokens.values())
        counts = {"steps": self.num_steps, "tokens_computed": self.num_computed_tokens}
        return times | counts | {"tokens_a_step": num_tokens / self.num_steps}


def race(racers: Mapping[str, Racer], title: str | None = None) -> None:
    """Let all racers take turns until their tasks are done."""
    take_turns({name: racer.next_slice for name, racer in racers.items()}, SLICES, warm_ups=0, title=title)


def sampling_params(name: str, task: Task) -> Any:
    """Return parameters for exactly the task's tokens: greedy, or with a seed if there are several samples."""
    options: dict[str, Any] = {"temperature": 0.0} if task.n == 1 else {"n": task.n, "seed": 0}
    return stage(name).SamplingParams(max_tokens=task.num_output_tokens, ignore_eos=True, **options)


# ---- counts, which need no model and no clock


def serve(name: str, engine: Any, tasks: Sequence[Task], prefix: str = "") -> list[Any]:
    """Serve tasks, all at once, with an LLMEngine of stage `name`. Return the outputs of the last step."""
    for number, task in enumerate(tasks):
        engine.add_request(f"{prefix}{number}", task.prompt, sampling_params(name, task))
    outputs: list[Any] = []
    while engine.has_unfinished_requests():
        outputs = engine.step() or outputs
    return outputs


def computed_twice(name: str, tokens_computed: float, tasks: Sequence[Task]) -> int:
    """Return how many tokens the model computed more often than necessary, if requests share nothing.

    The last token of a sample is never computed. Samples compute the prompt once from stage 5 on, except for its last
    token, which each of them computes.
    """
    assert name not in WITHOUT_SCHEDULER, "these stages never preempt"
    needed = sum(len(task.prompt) - 1 + task.n * task.num_output_tokens for task in tasks)
    return int(tokens_computed) - needed


def counts(name: str, engine: Any, tokens_computed: int, tasks: Sequence[Task]) -> dict[str, int]:
    """Return preemptions, tokens computed twice and blocks moved by an LLMEngine that has served all tasks."""
    twice = computed_twice(name, tokens_computed, tasks)
    moved = blocks_moved(engine.host_tier) if name == "s7" else {}
    return {"preemptions": engine.scheduler.num_preemptions, "computed_twice": twice, **moved}


def blocks_moved(host_tier: Any) -> dict[str, int]:
    """Return the blocks that stage 7 has stored on the host, and loaded from there."""
    return {"blocks_stored": host_tier.num_blocks_stored, "blocks_loaded": host_tier.num_blocks_loaded}
