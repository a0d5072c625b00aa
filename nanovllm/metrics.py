"""Metrics: the classes of vLLM's metrics reader, which hold a snapshot of an engine's counters and histograms."""

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass

# Bounds of histogram buckets, as in vLLM: the first three are in seconds
SECONDS = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
TO_FIRST_TOKEN = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0),
    *(2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
PER_TOKEN = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
SAMPLES_PER_REQUEST = (1, 2, 5, 10, 20)
STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


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
    """A list of counters, such as one for each position in a draft of tokens."""

    values: list[int]


@dataclass
class Gauge(Metric):
    """A current value."""

    value: float


@dataclass
class Histogram(Metric):
    """A distribution of observed values. buckets["0.5"] counts the values up to 0.5, and buckets["+Inf"] all values."""

    count: int  # of all values
    sum: float
    buckets: dict[str, int]


class Observations:
    """A histogram that still receives values, and counts them by bucket."""

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
        buckets, num_values = {}, 0
        for bound, count in zip([*(str(float(bound)) for bound in self._bounds), "+Inf"], self._counts, strict=True):
            buckets[bound] = num_values = num_values + count
        return Histogram(name, labels, num_values, self._sum, buckets)


def token_bounds(limit: int) -> tuple[int, ...]:
    """Return the bounds of buckets that count tokens: 1, 2, 5, 10, 20, 50, ... up to `limit`.

    >>> token_bounds(64), token_bounds(0)
    ((1, 2, 5, 10, 20, 50), ())
    """
    bounds = (digit * 10**power for power in range(len(str(limit))) for digit in (1, 2, 5))
    return tuple(bound for bound in bounds if bound <= limit)
