"""Random histories of an engine as data: its options, and the events that happen to it.

Everything is drawn from a random.Random, either a seeded one or hypothesis' own, which can shrink its draws. A plan
prints as the Python that recreates it.
"""

import random
from collections.abc import Callable, Iterator
from typing import NamedTuple

from tests.scripted_llm import VOCAB_SIZE, Stage

TEXTS = [
    [random.Random(i).randrange(VOCAB_SIZE) for _ in range(100)] for i in range(3)
]  # prompts begin with one of these


class EngineOptions(NamedTuple):
    block_size: int
    num_blocks: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    watermark: float
    enable_prefix_caching: bool
    num_host_blocks: int
    offload_policy: str
    reservation: str
    load_delays: tuple[int, ...]  # for one load after another

    @property
    def num_slots(self) -> int:
        return self.block_size * self.num_blocks


class Request(NamedTuple):
    """A request arrives."""

    text: int  # an index into TEXTS
    num_shared: int  # tokens of that text
    own: tuple[int, ...]  # the rest of the prompt
    follows: bool  # the prompt begins with the whole text of the request that ended last
    n: int
    max_tokens: int
    seed: int
    stop_token_ids: tuple[int, ...]


class Step(NamedTuple):
    count: int


class Drain(NamedTuple):
    """Step until no request is left."""


class Abort(NamedTuple):
    which: int  # of the open requests, or an unknown one


class Stream(NamedTuple):
    """LLM.stream(), closed after `take` outputs."""

    requests: tuple[Request, ...]
    take: int


class Beams(NamedTuple):
    request: Request
    width: int


class Fail(NamedTuple):
    """A step of the model raises."""

    after: int  # steps that still succeed


Event = Request | Step | Drain | Abort | Stream | Beams | Fail


class Plan(NamedTuple):
    options: EngineOptions
    events: list[Event]


def random_options(rng: random.Random) -> EngineOptions:
    block_size = rng.choice([1, 2, 3, 4, 4, 8, 16])
    return EngineOptions(
        block_size=block_size,
        num_blocks=rng.randint(2, max(6, rng.choice([40, 80]) // block_size)),
        max_model_len=rng.choice([24, 48, 48, 90]),
        max_num_seqs=rng.choice([1, 2, 3, 4, 8, 32]),
        max_num_batched_tokens=rng.choice([1, 2, 3, 5, 8, 64]),
        watermark=rng.choice([0.0, 0.0, 0.05, 0.3, 0.9]),
        enable_prefix_caching=rng.randint(0, 5) > 0,
        num_host_blocks=rng.choice([0, 1, 4, 16, 64]),
        offload_policy=rng.choice(["load", "load", "load", "recompute"]),
        reservation=rng.choice(["max_model_len", "request"]),
        load_delays=rng.choice([(0,), (0, 3), (1, 2, 0), (9, 0, 0, 4)]),
    )


def random_request(rng: random.Random, n: tuple[int, ...] = (1,)) -> Request:
    num_shared = rng.choice([0, 16, 32, rng.randint(0, 12), rng.randint(0, 40)])
    own = tuple(rng.randrange(VOCAB_SIZE) for _ in range(rng.choice([0, 1, 1, 2, 5])))
    own = own if num_shared + len(own) else (0,)
    samples, max_tokens = rng.choice(n), rng.choice([1, 2, rng.randint(1, 12), rng.randint(1, 40)])
    return Request(
        text=rng.randrange(len(TEXTS)),
        num_shared=num_shared,
        own=own,
        follows=rng.randint(0, 4) == 0,
        n=samples,
        max_tokens=max_tokens,
        seed=rng.randrange(12),
        stop_token_ids=tuple(rng.sample(range(VOCAB_SIZE), rng.choice([0, 0, 3, 12]))),
    )


def samples_of(stage: Stage) -> tuple[int, ...]:
    """Return the values that `n` is drawn from."""
    return (1, 1, 2, 3, 5) if stage.has_samples else (1,)


def random_fail(rng: random.Random) -> Fail:
    return Fail(after=rng.choice([0, 0, 1, 2, 5]))


def random_stream(stage: Stage, rng: random.Random) -> Stream:
    requests = tuple(random_request(rng, samples_of(stage)) for _ in range(rng.choice([1, 2, 5, 9])))
    return Stream(requests, take=rng.choice([1, rng.randint(1, 40), 10_000]))


def random_events(stage: Stage, rng: random.Random) -> Iterator[Event]:
    """Yield one event, or a few that belong together. A stage without an engine only has streams and failures."""
    if not stage.has_engine:
        yield random_fail(rng) if rng.randint(0, 3) == 0 else random_stream(stage, rng)
        return
    draw = rng.randrange(100)
    if draw < 24:
        for _ in range(rng.choice([1, 1, 2, 4, 8])):
            yield random_request(rng, samples_of(stage))
    elif draw < 82:
        yield Step(rng.choice([1, 2, 3, 5, 8]))
    elif draw < 86:
        yield Abort(rng.randrange(20))
    elif draw < 88:
        yield random_fail(rng)
    else:
        if rng.randint(0, 3):
            yield Drain()
        beams = [Beams(random_request(rng), rng.choice([1, 2, 3, 5]))] if stage.has_beams else []
        yield rng.choice([random_stream(stage, rng), *beams])


def random_plan(stage: Stage, rng: random.Random, num_events: int) -> Plan:
    events: list[Event] = []
    options = random_options(rng)
    while len(events) < num_events:
        events += random_events(stage, rng)
    return Plan(options, events)


def shrink(plan: Plan, is_faulty: Callable[[Plan], bool]) -> Plan:
    """Return a part of a faulty plan that is still faulty, without any run of events that it does not need."""
    size = len(plan.events)
    while size:
        start = 0
        while start < len(plan.events):
            without = Plan(plan.options, plan.events[:start] + plan.events[start + size :])
            if is_faulty(without):
                plan = without
            else:
                start += size
        size //= 2
    return plan
