"""Random histories as data: the options of the engine and one event after another.

A plan prints as the Python code that builds it.
"""

import random
from collections.abc import Callable, Iterator
from typing import NamedTuple

from .script import OPERATIONS, VOCAB_SIZE

TEXTS = [[random.Random(i).randrange(VOCAB_SIZE) for _ in range(100)] for i in range(3)]  # the prompts start with these


class Setup(NamedTuple):
    block_size: int
    num_blocks: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    watermark: float
    enable_prefix_caching: bool
    num_host_blocks: int
    offload_policy: str
    load_delays: tuple[int, ...]  # in turn
    async_scheduling: bool = False

    @property
    def num_slots(self) -> int:
        return self.block_size * self.num_blocks


class Poison(NamedTuple):
    """A fault that makes every step raise once a sample has this many tokens."""

    sample: int
    num_tokens: int


class Ask(NamedTuple):
    """A request arrives."""

    text: int  # index into TEXTS
    num_shared: int  # tokens of that text
    own: tuple[int, ...]  # the rest of the prompt
    follows: bool  # start the prompt with all tokens of the request that ended last
    n: int
    max_tokens: int
    seed: int
    stop_token_ids: tuple[int, ...]
    poison: Poison | None


class Step(NamedTuple):
    num_steps: int


class Drain(NamedTuple):
    """Step until no request is left."""


class Abort(NamedTuple):
    which: int  # of the open requests, and an unknown one


class Stream(NamedTuple):
    """LLM.stream(), closed after this many outputs."""

    asks: tuple[Ask, ...]
    take: int


class Beams(NamedTuple):
    ask: Ask
    width: int


class Reset(NamedTuple):
    """Empty the prefix cache."""


class Fail(NamedTuple):
    operation: str
    after: int  # successes before the fault


Event = Ask | Step | Drain | Abort | Stream | Beams | Reset | Fail


class Plan(NamedTuple):
    setup: Setup
    events: list[Event]


def random_setup(rng: random.Random) -> Setup:
    block_size = rng.choice([1, 2, 3, 4, 4, 8, 16])
    return Setup(
        block_size=block_size,
        num_blocks=rng.randint(2, max(6, rng.choice([40, 80]) // block_size)),
        max_model_len=rng.choice([24, 48, 48, 90]),
        max_num_seqs=rng.choice([1, 2, 3, 4, 8, 32]),
        max_num_batched_tokens=rng.choice([1, 2, 3, 5, 8, 64]),
        watermark=rng.choice([0.0, 0.0, 0.05, 0.3, 0.9]),
        enable_prefix_caching=rng.randint(0, 5) > 0,
        num_host_blocks=rng.choice([0, 1, 4, 16, 64]),
        offload_policy=rng.choice(["load", "load", "load", "recompute"]),
        load_delays=rng.choice([(0,), (0, 3), (1, 2, 0), (9, 0, 0, 4)]),
        async_scheduling=rng.random() < 0.5,
    )


def random_ask(rng: random.Random, n: tuple[int, ...] = (1, 1, 2, 3, 5)) -> Ask:
    num_shared = rng.choice([0, 16, 32, rng.randint(0, 12), rng.randint(0, 40)])
    own = tuple(rng.randrange(VOCAB_SIZE) for _ in range(rng.choice([0, 1, 1, 2, 5])))
    own = own if num_shared + len(own) else (0,)
    samples, max_tokens = rng.choice(n), rng.choice([1, 2, rng.randint(1, 12), rng.randint(1, 40)])
    poison = Poison(rng.randrange(samples), rng.randint(1, num_shared + max_tokens + 5))
    return Ask(
        text=rng.randrange(len(TEXTS)),
        num_shared=num_shared,
        own=own,
        follows=rng.randint(0, 4) == 0,
        n=samples,
        max_tokens=max_tokens,
        seed=rng.randrange(12),
        stop_token_ids=tuple(rng.sample(range(VOCAB_SIZE), rng.choice([0, 0, 3, 12]))),
        poison=poison if rng.randint(0, 9) == 0 else None,
    )


def random_stream(rng: random.Random) -> Stream:
    asks = tuple(random_ask(rng) for _ in range(rng.choice([1, 2, 5, 9])))
    return Stream(asks, take=rng.choice([1, rng.randint(1, 40), 10_000]))


def random_events(rng: random.Random) -> Iterator[Event]:
    """Yield the next events: one, or a few that belong together."""
    draw = rng.randrange(100)
    if draw < 24:
        for _ in range(rng.choice([1, 1, 2, 4, 8])):
            yield random_ask(rng)
    elif draw < 82:
        yield Step(rng.choice([1, 2, 3, 5, 8]))
    elif draw < 86:
        yield Abort(rng.randrange(20))
    elif draw < 93:
        yield Fail(rng.choice(OPERATIONS), after=rng.choice([0, 0, 1, 2, 5]))
    elif draw < 95:
        yield Reset()
    else:
        if rng.randint(0, 3):
            yield Drain()
        rare: list[Event] = [random_stream(rng), Beams(random_ask(rng, n=(1,)), rng.choice([1, 2, 3, 5])), Reset()]
        yield rng.choice(rare)


def random_plan(rng: random.Random, num_events: int) -> Plan:
    events: list[Event] = []
    setup = random_setup(rng)
    while len(events) < num_events:
        events += random_events(rng)
    return Plan(setup, events)


def smallest(plan: Plan, is_faulty: Callable[[Plan], bool]) -> Plan:
    """Return a part of a faulty plan that is still faulty, and has no run of events that could be left out."""
    size = len(plan.events)
    while size:
        start = 0
        while start < len(plan.events):
            without = Plan(plan.setup, plan.events[:start] + plan.events[start + size :])
            if is_faulty(without):
                plan = without
            else:
                start += size
        size //= 2
    return plan
