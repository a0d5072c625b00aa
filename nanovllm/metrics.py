"""Metrics: the numbers of an engine at one moment, in the classes of vLLM's reader."""

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass
class Metric:
    name: str
    labels: dict[str, str]


@dataclass
class Counter(Metric):
    """A value that never decreases."""

    value: int


@dataclass
class Vector(Metric):
    """A list of counters, by position in a draft."""

    values: list[int]


@dataclass
class Gauge(Metric):
    """A current value."""

    value: float


@dataclass
class Histogram(Metric):
    """The number of observed values up to each bound: buckets["0.5"], ... buckets["+Inf"]."""

    count: int
    sum: float
    buckets: dict[str, int]


class Observations:
    """A histogram in progress, which counts values by bucket."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def add(self, value: float) -> None:
        """Count a value."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def with_more(self, values: Iterable[float]) -> "Observations":
        """Return a copy that also counts `values`."""
        copy = Observations(self._bounds)
        copy._counts, copy._sum = self._counts.copy(), self._sum
        for value in values:
            copy.add(value)
        return copy

    def histogram(self, name: str, labels: dict[str, str]) -> Histogram:
        """Return a Histogram. Its buckets are cumulative: each one includes those before it."""
        buckets, total = {}, 0
        for bound, count in zip([*(str(float(bound)) for bound in self._bounds), "+Inf"], self._counts, strict=True):
            buckets[bound] = total = total + count
        return Histogram(name, labels, total, self._sum, buckets)
