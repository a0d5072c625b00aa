"""Requests that arrive while others are served, in stage 3's static batches or with an engine from stage 4 on.

The clock moves only while a step runs, and jumps to the next arrival when the engine is idle; nothing ever sleeps. If
it counts steps, a run is the same on every machine. If it counts seconds, a step takes the processor time of its
thread, so other work on the machine doesn't count.
"""

import time
from collections import deque
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from stages.bench.engines import stage

Clock = Literal["steps", "seconds"]


class Arrival(NamedTuple):
    """A request, and when it arrives."""

    time: float  # in steps or seconds, as the clock counts
    prompt: list[int]
    num_output_tokens: int

    @property
    def num_tokens(self) -> int:
        return len(self.prompt) + self.num_output_tokens

    @property
    def options(self) -> dict[str, Any]:
        """Options of SamplingParams."""
        return {"temperature": 0.0, "max_tokens": self.num_output_tokens, "ignore_eos": True}


class Work(NamedTuple):
    """The part of a step that belongs to one sequence."""

    start: int  # tokens computed before
    num_tokens: int
    sampled: bool


class Step(NamedTuple):
    """A step of the engine."""

    start: float  # on the clock
    end: float
    seconds: float  # its duration, whatever the clock counts
    work: dict[int, Work]  # by request, in order of arrival
    held: float  # share of the pool's blocks


class Again(NamedTuple):
    """Tokens that went through the model more than once."""

    of_prompts: int
    generated: int

    @property
    def total(self) -> int:
        return self.of_prompts + self.generated


class Timeline(NamedTuple):
    """All steps of a run."""

    arrivals: list[Arrival]
    steps: list[Step]
    num_preemptions: int

    @property
    def seconds(self) -> float:
        """The duration of all steps, without idle time."""
        return sum(step.seconds for step in self.steps)

    @property
    def tokens_computed(self) -> int:
        return sum(work.num_tokens for step in self.steps for work in step.work.values())

    @property
    def recomputed(self) -> Again:
        """Tokens that were computed more than once."""
        furthest = [0] * len(self.arrivals)
        of_prompts = generated = 0
        for step in self.steps:
            for i, (start, count, _) in step.work.items():
                end, length = min(start + count, furthest[i]), len(self.arrivals[i].prompt)
                of_prompts += max(min(end, length) - start, 0)
                generated += max(end - max(start, length), 0)
                furthest[i] = max(furthest[i], start + count)
        return Again(of_prompts, generated)

    def token_times(self) -> list[list[float]]:
        """Return when the tokens of each request arrived, on the clock."""
        times: list[list[float]] = [[] for _ in self.arrivals]
        for i, end in ((i, step.end) for step in self.steps for i, work in step.work.items() if work.sampled):
            times[i].append(end)
        return times


class Stuck(RuntimeError):
    """No sequence can run, but not all have finished."""


class Watch:
    """A model runner that wraps another one. It times each step and records the work of each sequence."""

    def __init__(self, engine: Any, clock: Clock) -> None:
        """Watch `engine`, an LLM of stage 3 or an LLMEngine, until timeline()."""
        self.now, self.steps = 0.0, list[Step]()
        self._engine, self._runner, self._clock = engine, engine.model_runner, clock
        self._ended = time.thread_time()  # when the previous step ended
        engine.model_runner = self

    def timeline(self, arrivals: list[Arrival], num_preemptions: int = 0) -> Timeline:
        """Return all steps, and give the engine its own runner back."""
        self._engine.model_runner = self._runner
        return Timeline(arrivals, self.steps, num_preemptions)

    def wait_until(self, moment: float) -> None:
        """Let the clock jump over idle time."""
        self.now, self._ended = max(self.now, moment), time.thread_time()

    def run(self, batch: Sequence[Any]) -> list[Any]:
        """Run a step, and record it."""
        pool = self._engine.kv_cache_manager.pool
        held = 1 - len(pool.free) / pool.num_blocks
        before = {int(seq.request_id): (seq.num_computed_tokens, count) for seq, count in batch}
        tokens: list[Any] = self._runner.run(batch)
        work = {i: Work(*part, token is not None) for (i, part), token in zip(before.items(), tokens, strict=True)}
        seconds = time.thread_time() - self._ended  # with scheduling and bookkeeping
        end = self.now + (1 if self._clock == "steps" else seconds)
        self.steps.append(Step(self.now, end, seconds, dict(sorted(work.items())), held))
        self.now, self._ended = end, time.thread_time()
        return tokens


def static(llm: Any, arrivals: list[Arrival], clock: Clock = "steps") -> Timeline:
    """Serve static batches with `llm`, a new LLM of stage 3.

    A batch has as many requests as have arrived and fit. It is served to the end before the next one begins.
    """
    watch, coming, params = Watch(llm, clock), deque(arrivals), stage("s3").SamplingParams
    while coming:
        watch.wait_until(coming[0].time)
        batch = [coming.popleft()]
        while coming and coming[0].time <= watch.now and len(batch) < llm.config.max_num_seqs:
            promised = sum(-(-a.num_tokens // llm.config.block_size) for a in (*batch, coming[0]))
            if promised > llm.kv_cache_manager.num_blocks:
                break
            batch.append(coming.popleft())
        llm.generate([arrival.prompt for arrival in batch], [params(**a.options) for a in batch])
    return watch.timeline(arrivals)


def continuous(engine: Any, arrivals: list[Arrival], clock: Clock = "steps", name: str = "s4") -> Timeline:
    """Serve with an LLMEngine of stage `name`. A request is added before the first step after its arrival.

    Each request has one sample. Raise Stuck if no sequence can run.
    """
    watch, coming, params = Watch(engine, clock), deque(enumerate(arrivals)), stage(name).SamplingParams
    num_preemptions = engine.scheduler.num_preemptions
    while coming or engine.has_unfinished_requests():
        if not engine.has_unfinished_requests():
            watch.wait_until(coming[0][1].time)
        while coming and coming[0][1].time <= watch.now:
            number, arrival = coming.popleft()
            engine.add_request(str(number), arrival.prompt, params(**arrival.options))
        num_steps = len(watch.steps)
        outputs = engine.step()
        if len(watch.steps) == num_steps and not outputs and engine.has_unfinished_requests():
            queues = engine.scheduler
            raise Stuck(f"{len(queues.running)} run, {len(queues.waiting)} wait, and no step has work")
    return watch.timeline(arrivals, engine.scheduler.num_preemptions - num_preemptions)
