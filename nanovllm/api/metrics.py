"""get_metrics(): the engine's counts under vLLM's names, as objects like those of vllm.v1.metrics.reader."""

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .stats import EngineStats
    from .tally import Tally


@dataclass
class Metric:
    name: str
    labels: dict[str, str]


@dataclass
class Counter(Metric):
    """It never becomes less."""

    value: int


@dataclass
class Vector(Metric):
    """Several counters in order. vLLM has one, of speculative decoding: here there is none."""

    values: list[int]


@dataclass
class Gauge(Metric):
    """A value now."""

    value: float


@dataclass
class Histogram(Metric):
    """How many of the observed values are at most as large as each bound: buckets["0.5"], ... buckets["+Inf"]."""

    count: int
    sum: float
    buckets: dict[str, int]


class Observations:
    """Values as they come, counted by the bucket in which they fall."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def add(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def with_more(self, values: Iterable[float]) -> "Observations":
        """Others, which have these values too."""
        others = Observations(self._bounds)
        others._counts, others._sum = self._counts.copy(), self._sum
        for value in values:
            others.add(value)
        return others

    def histogram(self, name: str, labels: dict[str, str]) -> Histogram:
        """Its buckets add up: each counts the ones before it too."""
        buckets, total = {}, 0
        for bound, count in zip([*map(bound_name, self._bounds), "+Inf"], self._counts, strict=True):
            buckets[bound] = total = total + count
        return Histogram(name, labels, total, self._sum, buckets)


def bound_name(bound: float) -> str:
    return str(float(bound))


def as_metrics(stats: "EngineStats", tally: "Tally", labels: dict[str, str], bytes_of_a_block: int) -> list[Metric]:
    """Gauges and counters. To vLLM a block on the host is outside, external."""
    lookups = tally.lookups
    gauges = {
        "num_requests_running": stats.running,
        "num_requests_waiting": stats.waiting,
        "kv_cache_usage_perc": stats.blocks_running / stats.num_blocks,
    }
    counters = {
        "prefix_cache_queries": lookups.queries,
        "prefix_cache_hits": lookups.hits,
        "external_prefix_cache_queries": lookups.host_queries,
        "external_prefix_cache_hits": lookups.host_hits,
        "kv_offload_load_bytes": stats.blocks_loaded * bytes_of_a_block,
        "kv_offload_store_bytes": stats.blocks_stored * bytes_of_a_block,
        "num_preemptions": stats.preemptions,
        "prompt_tokens": stats.prompt_tokens,
        "prompt_tokens_cached": stats.cached_tokens,
        "generation_tokens": stats.generation_tokens,
    }
    metrics: list[Metric] = [Gauge(f"vllm:{name}", labels.copy(), float(value)) for name, value in gauges.items()]
    metrics += [Counter(f"vllm:{name}", labels.copy(), value) for name, value in counters.items()]
    for reason in ("stop", "length", "abort", "error", "repetition"):
        ended = labels | {"finished_reason": reason}
        metrics.append(Counter("vllm:request_success", ended, tally.ended[reason]))
    return metrics
