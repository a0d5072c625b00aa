"""get_metrics(): the engine's counts under vLLM's names, as objects like those of vllm.v1.metrics.reader."""

import time
from bisect import bisect_left
from collections import Counter as Count
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from ..core.sequence import Sequence
    from .stats import EngineStats


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


SECONDS = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
TO_FIRST_TOKEN = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0),
    *(2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
A_TOKEN = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
SAMPLES = (1, 2, 5, 10, 20)
TOKENS = tuple(digit * 10**power for power in range(7) for digit in (1, 2, 5))


class Observations:
    """Values as they come, counted by the bucket in which they fall."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def add(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def histogram(self, name: str, labels: dict[str, str]) -> Histogram:
        """Its buckets add up: each counts the ones before it too."""
        buckets, total = {}, 0
        for bound, count in zip([*map(bound_name, self._bounds), "+Inf"], self._counts, strict=True):
            buckets[bound] = total = total + count
        return Histogram(name, labels, total, self._sum, buckets)


def bound_name(bound: float) -> str:
    return str(float(bound))


class Tally:
    """Counts of sequences that have ended. Sequences that run are counted when somebody asks."""

    def __init__(self) -> None:
        self.ended: Count[str] = Count()  # by finish_reason
        self.prompt_tokens = self.cached_tokens = self.generation_tokens = 0
        self.observed = {
            "vllm:request_prompt_tokens": Observations(TOKENS),
            "vllm:request_generation_tokens": Observations(TOKENS),
            "vllm:request_params_max_tokens": Observations(TOKENS),
            "vllm:request_params_n": Observations(SAMPLES),
            "vllm:time_to_first_token_seconds": Observations(TO_FIRST_TOKEN),
            "vllm:request_time_per_output_token_seconds": Observations(A_TOKEN),
            "vllm:e2e_request_latency_seconds": Observations(SECONDS),
            "vllm:request_queue_time_seconds": Observations(SECONDS),
        }

    def note_admission(self, seq: "Sequence") -> None:
        """It has its blocks, and shares them with the samples that it carries."""
        seconds = time.perf_counter() - seq.metrics.arrival_time
        for _ in [seq, *seq.to_fork]:
            self._observe("request_queue_time_seconds", seconds)

    def note_end(self, seq: "Sequence") -> None:
        num_tokens = seq.num_tokens - seq.num_prompt_tokens
        prompt_tokens, cached_tokens = prompt_tokens_of(seq)
        self.ended[seq.finish_reason] += 1
        self.generation_tokens += num_tokens
        self.prompt_tokens += prompt_tokens
        self.cached_tokens += cached_tokens
        self._observe("request_prompt_tokens", seq.num_prompt_tokens)
        self._observe("request_generation_tokens", num_tokens)
        self._observe("request_params_max_tokens", seq.max_num_tokens - seq.num_prompt_tokens)
        self._observe("request_params_n", seq.params.n)
        times = seq.metrics
        self._observe("e2e_request_latency_seconds", times.finished_time - times.arrival_time)
        if times.first_token_time is not None:
            self._observe("time_to_first_token_seconds", times.first_token_time - times.arrival_time)
            if num_tokens > 1:
                seconds = (times.finished_time - times.first_token_time) / (num_tokens - 1)
                self._observe("request_time_per_output_token_seconds", seconds)

    def _observe(self, name: str, value: float) -> None:
        self.observed[f"vllm:{name}"].add(value)


def prompt_tokens_of(seq: "Sequence") -> tuple[int, int]:
    """The tokens of its prompt once they are computed, and how many of them were cached. Its first sample has them."""
    if seq.sample_index or seq.metrics.first_token_time is None:
        return 0, 0
    return seq.num_prompt_tokens, getattr(seq, "num_cached_tokens", None) or 0


class BlockSize(NamedTuple):
    tokens: int
    bytes: int


def as_metrics(stats: "EngineStats", tally: Tally, model_name: str, block: BlockSize) -> list[Metric]:
    """All of them, with the labels that vLLM gives them. To vLLM a block on the host is outside, external."""
    on_host = stats.blocks_loaded * block.tokens
    on_device = stats.prefix_hits - on_host
    labels = {"model_name": model_name, "engine": "0"}
    gauges = {
        "num_requests_running": stats.running,
        "num_requests_waiting": stats.waiting,
        "kv_cache_usage_perc": stats.blocks_running / stats.num_blocks,
    }
    counters = {
        "prefix_cache_queries": stats.prefix_queries,
        "prefix_cache_hits": on_device,
        "external_prefix_cache_queries": stats.prefix_queries - on_device if stats.num_host_blocks else 0,
        "external_prefix_cache_hits": on_host,
        "kv_offload_load_bytes": stats.blocks_loaded * block.bytes,
        "kv_offload_store_bytes": stats.blocks_stored * block.bytes,
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
    metrics += [observed.histogram(name, labels.copy()) for name, observed in tally.observed.items()]
    return metrics
