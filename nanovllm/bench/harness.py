"""The measuring loop: calls take turns, so while the machine is slow, all of them are affected equally.

rounds = take_turns({"s3": timed(step_of_s3), "s4": timed(step_of_s4)}, num_rounds=7)
ratio(rounds, "s3", "s4")       how many times as fast s4 is: the median, the least and the largest of the rounds
"""

import random
import statistics
import sys
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from operator import itemgetter
from typing import Any, NamedTuple, TypeVar

from tqdm import tqdm

Key = TypeVar("Key", bound=Hashable)
Result = TypeVar("Result")
Scores = dict[str, Any]  # numbers by name, and under NAME_spread the least and the largest
Rounds = Sequence[Mapping[Key, Any]]  # results by call
GetNumber = Callable[[Any], float]
speed: GetNumber = itemgetter("tokens_per_second")  # of Scores


class Spread(NamedTuple):
    """The median, the least and the largest number of several rounds."""

    median: float
    least: float
    largest: float

    @classmethod
    def of(cls, numbers: Sequence[float]) -> "Spread":
        """Return the spread of one number per round."""
        return cls(statistics.median(numbers), min(numbers), max(numbers))

    def named(self, name: str) -> dict[str, Any]:
        """Return two entries for a file of results: the median, and the least and the largest number.

        >>> Spread(2.0, 1.0, 3.0).named("gain")
        {'gain': 2.0, 'gain_spread': [1.0, 3.0]}
        """
        return {name: self.median, f"{name}_spread": [self.least, self.largest]}

    def text(self, unit: str) -> str:
        """Format the numbers for a report.

        >>> Spread(2.0, 1.0, 3.0).text("times as fast")
        '2.00 times as fast (1.00 to 3.00)'
        """
        return f"{self.median:.2f} {unit} ({self.least:.2f} to {self.largest:.2f})"


def take_turns(
    calls: Mapping[Key, Callable[[], Result]],
    num_rounds: int,
    *,
    warm_ups: int = 1,
    least_rounds: int | None = None,
    seconds: float | None = None,
    title: str | None = None,
) -> list[dict[Key, Result]]:
    """Make every call once per round, and return the results of each round.

    The order is random in each round: a call that always followed the same other call would always find the same data
    in the processor's caches. The first `warm_ups` rounds are not returned. With `seconds`, no round starts after that
    time, once `least_rounds` rounds are done. `title` shows a progress bar in a terminal.
    """
    rounds: list[dict[Key, Result]] = []
    order, rng, started = list(calls), random.Random(0), time.perf_counter()
    is_hidden = title is None or not sys.stderr.isatty()
    for number in tqdm(range(warm_ups + num_rounds), title, disable=is_hidden, leave=False):
        has_enough = number >= warm_ups + (num_rounds if least_rounds is None else least_rounds)
        if seconds is not None and has_enough and time.perf_counter() - started >= seconds:
            break
        rng.shuffle(order)
        results = {key: calls[key]() for key in order}
        rounds.append({key: results[key] for key in calls})
    return rounds[warm_ups:]


def seconds_of(call: Callable[[], object]) -> float:
    """Return the seconds that one call takes."""
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def timed(call: Callable[[], object], wait: Callable[[], object] = lambda: None) -> Callable[[], float]:
    """Return a function that makes the call and returns the seconds that it takes. `wait` waits for a GPU, if any."""

    def run() -> float:
        wait()
        return seconds_of(lambda: (call(), wait()))

    return run


def medians(rounds: Sequence[Mapping[Key, float]]) -> dict[Key, float]:
    """Return the median of each number over the rounds.

    >>> medians([{"a": 1.0}, {"a": 5.0}, {"a": 2.0}])
    {'a': 2.0}
    """
    return {key: statistics.median(each[key] for each in rounds) for key in rounds[0]}


def with_spreads(rounds: Sequence[Mapping[str, Any]], scale: float = 1) -> Scores:
    """Return medians, with the least and the largest of each number that differs between rounds, all times `scale`.

    >>> with_spreads([{"ms": 1.0, "steps": 4}, {"ms": 5.0, "steps": 4}, {"ms": 2.0, "steps": 4}])
    {'ms': 2.0, 'steps': 4, 'ms_spread': [1.0, 5.0]}
    """
    rounds = [{key: scale * value for key, value in each.items()} for each in rounds] if scale != 1 else rounds
    spreads = {key: [min(each[key] for each in rounds), max(each[key] for each in rounds)] for key in rounds[0]}
    return medians(rounds) | {f"{key}_spread": spread for key, spread in spreads.items() if spread[0] < spread[1]}


def median_scores(rounds: Sequence[Mapping[Key, Scores]]) -> dict[Key, Scores]:
    """Return with_spreads() of each call, for calls that return several numbers by name."""
    return {key: with_spreads([each[key] for each in rounds]) for key in rounds[0]}


def figures(series: Mapping[str, Sequence[float]]) -> Scores:
    """Return the median of each series, and the least and the largest number.

    >>> figures({"copy": [3.0, 1.0, 2.0]})
    {'copy': 2.0, 'copy_spread': [1.0, 3.0]}
    """
    return {key: value for name, values in series.items() for key, value in Spread.of(values).named(name).items()}


def ratio(rounds: Rounds[Key], numerator: Key, denominator: Key, get_number: GetNumber = float) -> Spread:
    """Return the ratio of two results over the rounds. If results aren't numbers, `get_number` gets a number from each.

    >>> ratio([{"a": 2.0, "b": 1.0}, {"a": 9.0, "b": 3.0}, {"a": 4.0, "b": 4.0}], "a", "b")
    Spread(median=2.0, least=1.0, largest=3.0)
    """
    return Spread.of([get_number(each[numerator]) / get_number(each[denominator]) for each in rounds])


def ratios(rounds: Rounds[Key], pairs: Mapping[str, tuple[Key, Key]], get_number: GetNumber = float) -> Scores:
    """Return the ratio of each pair over the rounds, by name: the median, and the least and the largest."""
    spreads = {name: ratio(rounds, *pair, get_number) for name, pair in pairs.items()}
    return {key: value for name, spread in spreads.items() for key, value in spread.named(name).items()}


def repeated(call: Callable[[], object], times: int) -> Callable[[], None]:
    """Return a function that makes the call `times` times."""

    def run() -> None:
        for _ in range(times):
            call()

    return run


def percentiles(seconds: Sequence[float]) -> dict[str, float]:
    """Return percentiles in milliseconds, or an empty dict if there are no times.

    >>> percentiles([0.001, 0.002, 0.003])
    {'p50': 2.0, 'p90': 3.0, 'p99': 3.0}
    """
    ordered, last = sorted(seconds), len(seconds) - 1
    return {f"p{share}": round(1000 * ordered[round(share / 100 * last)], 3) for share in (50, 90, 99) if ordered}
