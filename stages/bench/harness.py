"""One way to compare: what is compared takes turns, so that a slow spell of the machine falls on all of it alike.

rounds = take_turns({"s3": step_of_s3, "s4": step_of_s4}, num_rounds=7)     each call returns its seconds
ratio(rounds, "s3", "s4")                                                   how many times as fast s4 is
"""

import random
import statistics
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from tqdm import tqdm

Key = TypeVar("Key", bound=Hashable)
Result = TypeVar("Result")
Scores = dict[str, Any]  # numbers by name, and the spread of those that were timed


class Spread(NamedTuple):
    """A ratio: the median of the rounds, the least and the largest."""

    ratio: float
    least: float
    largest: float

    @classmethod
    def of(cls, numbers: Sequence[float]) -> "Spread":
        return cls(statistics.median(numbers), min(numbers), max(numbers))

    def named(self, name: str) -> dict[str, Any]:
        """The two entries that results.json has for it.

        >>> Spread(2.0, 1.0, 3.0).named("gain")
        {'gain': 2.0, 'gain_spread': [1.0, 3.0]}
        """
        return {name: self.ratio, f"{name}_spread": [self.least, self.largest]}


def take_turns(
    calls: Mapping[Key, Callable[[], Result]],
    num_rounds: int,
    *,
    warm_ups: int = 1,
    least_rounds: int | None = None,
    seconds: float | None = None,
    title: str | None = None,
) -> list[dict[Key, Result]]:
    """What each call returned, a dict a round. Each round makes every call once.

    Each round has an order of its own. A call that always follows the same other one would find its memory in the
    processor's caches. Rounds that warm up come first and are not returned. With `seconds` no new round begins after
    that time, once there are `least_rounds`. `title` shows a progress bar.
    """
    rounds: list[dict[Key, Result]] = []
    order, rng, started = list(calls), random.Random(0), time.perf_counter()
    for number in tqdm(range(warm_ups + num_rounds), title, disable=title is None, leave=False):
        has_enough = number >= warm_ups + (num_rounds if least_rounds is None else least_rounds)
        if seconds is not None and has_enough and time.perf_counter() - started >= seconds:
            break
        rng.shuffle(order)
        results = {key: calls[key]() for key in order}
        rounds.append({key: results[key] for key in calls})
    return rounds[warm_ups:]


def seconds_of(call: Callable[[], object]) -> float:
    """The seconds of one call."""
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def timed(call: Callable[[], object]) -> Callable[[], float]:
    """The same call, which now returns its seconds."""
    return lambda: seconds_of(call)


def medians(rounds: list[dict[Key, float]]) -> dict[Key, float]:
    """
    >>> medians([{"a": 1.0}, {"a": 5.0}, {"a": 2.0}])
    {'a': 2.0}
    """
    return {key: statistics.median(each[key] for each in rounds) for key in rounds[0]}


def median_scores(rounds: list[dict[Key, Scores]]) -> dict[Key, Scores]:
    """The same for calls that return several numbers by name. What differs between rounds, a time, has its spread."""
    return {key: with_spreads([each[key] for each in rounds]) for key in rounds[0]}


def with_spreads(rounds: list[Scores]) -> Scores:
    """Medians; of each number that is not the same in all rounds its least and its largest too.

    >>> with_spreads([{"ms": 1.0, "steps": 4}, {"ms": 5.0, "steps": 4}, {"ms": 2.0, "steps": 4}])
    {'ms': 2.0, 'steps': 4, 'ms_spread': [1.0, 5.0]}
    """
    spreads = {key: [min(each[key] for each in rounds), max(each[key] for each in rounds)] for key in rounds[0]}
    return medians(rounds) | {f"{key}_spread": both for key, both in spreads.items() if both[0] < both[1]}


def ratio(rounds: list[dict[Key, float]], above: Key, below: Key) -> Spread:
    """
    >>> ratio([{"a": 2.0, "b": 1.0}, {"a": 9.0, "b": 3.0}, {"a": 4.0, "b": 4.0}], "a", "b")
    Spread(ratio=2.0, least=1.0, largest=3.0)
    """
    return Spread.of([numbers[above] / numbers[below] for numbers in rounds])


def milliseconds(calls: Mapping[Key, Callable[[], object]], rounds: int = 5) -> dict[Key, float]:
    """The median time of each call, in milliseconds."""
    times = take_turns({key: timed(call) for key, call in calls.items()}, rounds)
    return {key: 1000 * seconds for key, seconds in medians(times).items()}


def microseconds(call: Callable[[], object], times: int = 2000, rounds: int = 7) -> float:
    """The time of one of many calls in a row, in microseconds, for a call that is too short to time alone.

    It is the least of some rounds: whatever else runs on the machine can only add to it.
    """

    def many() -> None:
        for _ in range(times):
            call()

    return 1e6 * min(each[""] for each in take_turns({"": timed(many)}, rounds, warm_ups=0)) / times
