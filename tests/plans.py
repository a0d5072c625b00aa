"""Random histories of an engine as data: its knobs, and what happens to it, one event after another.

Everything is drawn from a random.Random: seeded, or hypothesis' own, which can shrink what it drew. A plan prints as
Python that makes it again.
"""

import random
from collections.abc import Callable, Iterator
from typing import NamedTuple

from tests.scripted_llm import VOCAB_SIZE, Stage

TEXTS = [[random.Random(i).randrange(VOCAB_SIZE) for _ in range(100)] for i in range(3)]  # what prompts begin with


class Knobs(NamedTuple):
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
    load_delays: tuple[int, ...]  # in turn

    @property
    def num_slots(self) -> int:
        return self.block_size * self.num_blocks


class Ask(NamedTuple):
    """A request arrives."""

    text: int  # of TEXTS
    num_shared: int  # tokens of that text
    own: tuple[int, ...]  # the rest of its prompt
    follows: bool  # its prompt begins with all that the last request that ended said
    n: int
    max_tokens: int
    seed: int
    stop_token_ids: tuple[int, ...]


class Step(NamedTuple):
    count: int


class Drain(NamedTuple):
    """Step until nobody is left."""


class Abort(NamedTuple):
    which: int  # of those that are here, and one that is not


class Stream(NamedTuple):
    """LLM.stream(), closed after so many outputs."""

    asks: tuple[Ask, ...]
    take: int


class Beams(NamedTuple):
    ask: Ask
    width: int


class Fail(NamedTuple):
    """A step of the model raises."""

    after: int  # so many that still go well


Event = Ask | Step | Drain | Abort | Stream | Beams | Fail


class Plan(NamedTuple):
    knobs: Knobs
    events: list[Event]


def random_knobs(rng: random.Random) -> Knobs:
    block_size = rng.choice([1, 2, 3, 4, 4, 8, 16])
    return Knobs(
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


def random_ask(rng: random.Random, n: tuple[int, ...] = (1,)) -> Ask:
    num_shared = rng.choice([0, 16, 32, rng.randint(0, 12), rng.randint(0, 40)])
    own = tuple(rng.randrange(VOCAB_SIZE) for _ in range(rng.choice([0, 1, 1, 2, 5])))
    own = own if num_shared + len(own) else (0,)
    samples, max_tokens = rng.choice(n), rng.choice([1, 2, rng.randint(1, 12), rng.randint(1, 40)])
    return Ask(
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
    """What `n` is drawn from."""
    return (1, 1, 2, 3, 5) if stage.has_samples else (1,)


def random_fail(rng: random.Random) -> Fail:
    return Fail(after=rng.choice([0, 0, 1, 2, 5]))


def random_stream(stage: Stage, rng: random.Random) -> Stream:
    asks = tuple(random_ask(rng, samples_of(stage)) for _ in range(rng.choice([1, 2, 5, 9])))
    return Stream(asks, take=rng.choice([1, rng.randint(1, 40), 10_000]))


def random_events(stage: Stage, rng: random.Random) -> Iterator[Event]:
    """What happens next: one event, or a few that belong together. A stage without an engine has streams only."""
    if not stage.has_engine:
        yield random_fail(rng) if rng.randint(0, 3) == 0 else random_stream(stage, rng)
        return
    draw = rng.randrange(100)
    if draw < 24:
        for _ in range(rng.choice([1, 1, 2, 4, 8])):
            yield random_ask(rng, samples_of(stage))
    elif draw < 82:
        yield Step(rng.choice([1, 2, 3, 5, 8]))
    elif draw < 86:
        yield Abort(rng.randrange(20))
    elif draw < 88:
        yield random_fail(rng)
    else:
        if rng.randint(0, 3):
            yield Drain()
        beams = [Beams(random_ask(rng), rng.choice([1, 2, 3, 5]))] if stage.has_samples else []
        yield rng.choice([random_stream(stage, rng), *beams])


def random_plan(stage: Stage, rng: random.Random, num_events: int) -> Plan:
    events: list[Event] = []
    knobs = random_knobs(rng)
    while len(events) < num_events:
        events += random_events(stage, rng)
    return Plan(knobs, events)


def smallest(plan: Plan, is_faulty: Callable[[Plan], bool]) -> Plan:
    """A part of a faulty plan that is still faulty: without any run of events that it can do without."""
    size = len(plan.events)
    while size:
        start = 0
        while start < len(plan.events):
            without = Plan(plan.knobs, plan.events[:start] + plan.events[start + size :])
            if is_faulty(without):
                plan = without
            else:
                start += size
        size //= 2
    return plan
