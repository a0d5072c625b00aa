"""Requests that arrive while others are served: stage 3's static batches, stage 4's engine, and what each step did.

The clock moves only while a step runs, and jumps to the next arrival when nobody is there; nothing ever sleeps. If it
counts steps, a run is the same on every machine. If it counts seconds, a step takes what this thread needed for
it: what else the machine does meanwhile is not counted.
"""

import random
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, Literal, NamedTuple

import numpy as np

from notebooks.traffic import Request, requests
from stages import s3_paged_attention as s3
from stages import s4_continuous_batching as s4
from stages.s4_continuous_batching.block_manager import cdiv
from stages.s4_continuous_batching.sampling import SampledToken
from stages.s4_continuous_batching.scheduler import Scheduler

Clock = Literal["steps", "seconds"]


class Arrival(NamedTuple):
    time: float  # steps or seconds, as the clock counts
    prompt: list[int]
    num_output_tokens: int

    @property
    def num_tokens(self) -> int:
        return len(self.prompt) + self.num_output_tokens

    @property
    def options(self) -> dict[str, Any]:
        return {"temperature": 0.0, "max_tokens": self.num_output_tokens, "ignore_eos": True}


class Work(NamedTuple):
    """What a step computed of one sequence."""

    start: int  # tokens that were computed before
    num_tokens: int
    sampled: bool


class Step(NamedTuple):
    start: float  # on the clock
    end: float
    seconds: float  # that it took, whatever the clock counts
    work: dict[int, Work]  # by request, in order of arrival
    held: float  # share of the pool's blocks


class Again(NamedTuple):
    """Tokens that went through the model more than once."""

    of_prompts: int
    generated: int

    @property
    def total(self) -> int:
        return self.of_prompts + self.generated


class Run(NamedTuple):
    arrivals: list[Arrival]
    steps: list[Step]
    num_preemptions: int

    @property
    def seconds(self) -> float:
        """All steps together, without the time in which nobody was there."""
        return sum(step.seconds for step in self.steps)

    @property
    def tokens_computed(self) -> int:
        return sum(work.num_tokens for step in self.steps for work in step.work.values())

    @property
    def recomputed(self) -> "Again":
        """Tokens that had been computed before."""
        furthest = [0] * len(self.arrivals)
        of_prompts = generated = 0
        for step in self.steps:
            for i, (start, count, _) in step.work.items():
                end, length = min(start + count, furthest[i]), len(self.arrivals[i].prompt)
                of_prompts += max(min(end, length) - start, 0)
                generated += max(end - max(start, length), 0)
                furthest[i] = max(furthest[i], start + count)
        return Again(of_prompts, generated)

    @property
    def losses(self) -> list[int]:
        """How often each request was preempted: it began that many times again."""
        begun = [0] * len(self.arrivals)
        for step in self.steps:
            for i, work in step.work.items():
                begun[i] += work.start == 0
        return [times - 1 for times in begun]

    def token_times(self) -> list[list[float]]:
        """For each request, when its tokens came, on the clock."""
        times: list[list[float]] = [[] for _ in self.arrivals]
        for step in self.steps:
            for i, work in step.work.items():
                if work.sampled:
                    times[i].append(step.end)
        return times

    def first_token_waits(self) -> list[float]:
        """Time to first token, of each request."""
        return [times[0] - arrival.time for arrival, times in zip(self.arrivals, self.token_times(), strict=True)]

    def gaps(self) -> list[float]:
        """Inter-token latencies: from each token of a request to its next one."""
        return [after - before for times in self.token_times() for before, after in pairwise(times)]


class Stuck(RuntimeError):
    """Nobody can run, and not all have ended."""


class Watch:
    """Stands in for a model runner: passes each step on, takes its time, and notes who computed what."""

    def __init__(self, engine: Any, clock: Clock) -> None:
        """Watches `engine`, an LLM of stage 3 or an LLMEngine of stage 4, until `release`."""
        self.now, self.steps = 0.0, list[Step]()
        self._engine, self._runner, self._clock = engine, engine.model_runner, clock
        self._left = time.thread_time()  # when the step before ended
        engine.model_runner = self

    def release(self) -> None:
        self._engine.model_runner = self._runner

    def wait_until(self, moment: float) -> None:
        """Nobody is there: the clock jumps."""
        self.now, self._left = max(self.now, moment), time.thread_time()

    def run(self, batch: Sequence[Any]) -> list[Any]:
        manager = self._engine.kv_cache_manager
        held = 1 - manager.num_free_blocks / manager.num_blocks
        before = {int(seq.request_id): (seq.num_computed_tokens, count) for seq, count in batch}
        tokens = self._runner.run(batch)
        work = {i: Work(*part, token is not None) for (i, part), token in zip(before.items(), tokens, strict=True)}
        seconds = time.thread_time() - self._left  # scheduling and bookkeeping too
        end = self.now + (1 if self._clock == "steps" else seconds)
        self.steps.append(Step(self.now, end, seconds, dict(sorted(work.items())), held))
        self.now, self._left = end, time.thread_time()
        return tokens


def static(llm: s3.LLM, arrivals: list[Arrival], clock: Clock = "steps") -> Run:
    """Stage 3: those who have come, as many as there are seats and promises, are served to the end; then the next batch
    begins. `llm` is a new one.
    """
    watch, coming = Watch(llm, clock), deque(arrivals)
    while coming:
        watch.wait_until(coming[0].time)
        batch = [coming.popleft()]
        while coming and coming[0].time <= watch.now and len(batch) < llm.config.max_num_seqs:
            promised = sum(cdiv(a.num_tokens, llm.config.block_size) for a in (*batch, coming[0]))
            if promised > llm.kv_cache_manager.num_blocks:
                break
            batch.append(coming.popleft())
        llm.generate([arrival.prompt for arrival in batch], [s3.SamplingParams(**a.options) for a in batch])
    watch.release()
    return Run(arrivals, watch.steps, num_preemptions=0)


def continuous(engine: s4.LLMEngine, arrivals: list[Arrival], clock: Clock = "steps") -> Run:
    """Stage 4: a request is added before the first step that begins after its arrival. Raises Stuck."""
    watch, coming = Watch(engine, clock), deque(enumerate(arrivals))
    num_preemptions = engine.scheduler.num_preemptions
    while coming or engine.has_unfinished_requests():
        if not engine.has_unfinished_requests():
            watch.wait_until(coming[0][1].time)
        while coming and coming[0][1].time <= watch.now:
            number, arrival = coming.popleft()
            engine.add_request(str(number), arrival.prompt, s4.SamplingParams(**arrival.options))
        num_steps = len(watch.steps)
        told = engine.step()
        if len(watch.steps) == num_steps and not told and engine.has_unfinished_requests():
            queues = engine.scheduler
            raise Stuck(f"{len(queues.running)} run, {len(queues.waiting)} wait, and no step has work")
    watch.release()
    return Run(arrivals, watch.steps, engine.scheduler.num_preemptions - num_preemptions)


# ---- requests


def poisson(asked: Iterable[Request], mean_gap: float, seed: int = 0, vocab_size: int = 4096) -> list[Arrival]:
    """Requests of random tokens that come independently of each other, `mean_gap` apart on average, or all at once."""
    rng, now, made = random.Random(seed), 0.0, []
    for request in asked:
        prompt = [rng.randrange(3, vocab_size) for _ in range(request.num_prompt_tokens)]
        made.append(Arrival(now, prompt, request.num_output_tokens))
        now += rng.expovariate(1 / mean_gap) if mean_gap else 0
    return made


def slower(arrivals: Iterable[Arrival], factor: float) -> list[Arrival]:
    """The same requests, `factor` times as far apart."""
    return [arrival._replace(time=arrival.time * factor) for arrival in arrivals]


def percentiles(values: Sequence[float], at: Sequence[float] = (50, 95, 99)) -> list[float]:
    """
    >>> percentiles([1, 2, 3, 4, 5], at=(0, 50, 100))
    [1.0, 3.0, 5.0]
    """
    return [float(value) for value in np.percentile(values, at)]


def advance(stream: Iterator[Any], count: int) -> None:
    """Take the next `count` outputs."""
    for _ in range(count):
        next(stream)


def fastest(call: Callable[[], object], rounds: int = 7) -> float:
    """The least time that this thread needs for one of some calls, in seconds."""
    times = []
    for _ in range(rounds):
        begun = time.thread_time()
        call()
        times.append(time.thread_time() - begun)
    return min(times)


# ---- without a model


class Placeholder:
    """A model runner that computes nothing and always samples the same token. What can be counted needs no more."""

    def __init__(self) -> None:
        self.num_steps = self.num_tokens = 0

    def run(self, batch: Sequence[Any]) -> list[SampledToken | None]:
        self.num_steps, self.num_tokens = self.num_steps + 1, self.num_tokens + sum(count for _, count in batch)
        is_complete = [seq.num_computed_tokens + count == seq.num_tokens for seq, count in batch]
        return [SampledToken(3, 0.0) if complete else None for complete in is_complete]


def without_model(llm: Any) -> Any:
    """The same LLM of stage 3, which from now on computes nothing."""
    llm.model_runner = Placeholder()
    return llm


class WithoutModel(s4.LLMEngine):
    """Stage 4's engine with placeholders for tokens: it schedules, takes blocks and gives them back."""

    def __init__(self, policy: type[Scheduler] = Scheduler, **options: Any) -> None:
        """`policy` may be another Scheduler; `options` are EngineConfig's, kv_cache_tokens among them."""
        self._policy = policy
        super().__init__(s4.EngineConfig(**options))

    def build_tokenizer(self) -> None:
        return None

    def build_model(self) -> Any:
        return None

    def build_kv_cache(self) -> Any:
        assert self.config.kv_cache_tokens is not None
        return SimpleNamespace(num_blocks=self.config.kv_cache_tokens // self.config.block_size)

    def build_scheduler(self) -> Scheduler:
        return self._policy(self.config, self.kv_cache_manager)

    def build_model_runner(self, model: Any) -> Any:
        return Placeholder()


class Toll(NamedTuple):
    """What a policy costs, the means of some runs."""

    preemptions: float
    repeated: float  # of a request that had been preempted before
    computed_twice: float  # share of the tokens that went through the model
    steps: float
    tokens_computed: float
    for_100: float  # preemptions for 100 requests


def overloaded(model: str, blocks: int, seed: int, policy: type[Scheduler] = Scheduler, watermark: float = 0.01) -> Run:
    """A pool of `blocks` blocks of 16, kept full for a while by requests that are all there at once. Raises Stuck.

    Seats and tokens of a step grow with the pool, so that it is the pool that bounds what runs.
    """
    num_requests = min(max(16, blocks // 5), 1200)
    bounds = {"kv_cache_tokens": 16 * blocks, "max_num_seqs": blocks, "max_num_batched_tokens": max(blocks, 64)}
    engine = WithoutModel(policy, model=model, watermark=watermark, **bounds)
    return continuous(engine, poisson(requests(num_requests, seed), mean_gap=0, seed=seed))


def gets_stuck(serve: Callable[[], Run]) -> bool:
    try:
        serve()
    except Stuck:
        return True
    return False


def mean_toll(runs: Iterable[Run]) -> Toll:
    rows = [
        Toll(
            run.num_preemptions,
            sum(times - 1 for times in run.losses if times > 1),
            run.recomputed.total / run.tokens_computed,
            len(run.steps),
            run.tokens_computed,
            100 * run.num_preemptions / len(run.arrivals),
        )
        for run in runs
    ]
    return Toll(*(statistics.mean(column) for column in zip(*rows, strict=True)))
