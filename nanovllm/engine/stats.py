"""Statistics: EngineStats, one engine's state and counts, and the same as metrics under vLLM's names.

A request's states, and what is counted where:

    add_request -> WAITING --- admitted: it has all its blocks ---> RUNNING -----------> ENDED
                      ^                                              |  ^                stop, length, error
                      |              some come from the host: LOADING +  |
                      |              others run meanwhile          '-----+
                      +-- PREEMPTED: its blocks were taken for others, and it waits in front of all --'

    An abort ends it in any state. WAITING and RUNNING are the scheduler's two queues: a LOADING sequence is in
    `running` and not in the batch, and a PREEMPTED one is in `waiting` and has been admitted before.

The engine's parts count most of it already. A Tally, which is an Observer, counts the rest: nothing runs for it in a
step in which no sequence comes, goes or lacks blocks.
"""

import time
from bisect import bisect_left
from collections import Counter as Counts
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .sequence import Sequence

if TYPE_CHECKING:
    from .llm_engine import LLMEngine

SECONDS = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
TO_FIRST_TOKEN = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0),
    *(2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
PER_TOKEN = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
SAMPLES = (1, 2, 5, 10, 20)
STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)

HELP = {
    "vllm:num_requests_running": "Samples that hold blocks: they run, or wait for blocks on their way from the host.",
    "vllm:num_requests_waiting": "Samples that wait for a seat or for blocks.",
    "vllm:kv_cache_usage_perc": "Share of the pool's blocks that samples hold; 1 is all of them.",
    "vllm:num_preemptions": "How often a sample had to give its blocks to others.",
    "vllm:prefix_cache_queries": "Tokens looked up in the prefix cache when samples are admitted for the first time.",
    "vllm:prefix_cache_hits": "Tokens of these that were cached on the device.",
    "vllm:external_prefix_cache_queries": "Tokens not cached on the device, and looked up on the host.",
    "vllm:external_prefix_cache_hits": "Tokens of these that were cached on the host.",
    "vllm:kv_offload_load_bytes": "Bytes of blocks loaded from the host.",
    "vllm:kv_offload_store_bytes": "Bytes of blocks stored on the host.",
    "vllm:prompt_tokens": "Tokens of prompts that were computed or cached.",
    "vllm:prompt_tokens_cached": "Tokens of these that were cached, on the device or on the host.",
    "vllm:generation_tokens": "Tokens generated.",
    "vllm:request_success": "Samples that have ended, by the way they ended.",
    "vllm:admission_rejections": "Requests answered 429, by the limit that was reached.",
    "vllm:iteration_tokens_total": "Tokens through the model in a step.",
    "vllm:time_to_first_token_seconds": "From a request's arrival to its first token.",
    "vllm:inter_token_latency_seconds": "Between two tokens of a sample.",
    "vllm:request_time_per_output_token_seconds": "The mean of that, once for each sample that has ended.",
    "vllm:e2e_request_latency_seconds": "From a request's arrival to the end of a sample.",
    "vllm:request_queue_time_seconds": "From a request's arrival until it has its blocks.",
    "vllm:request_prompt_tokens": "Tokens of the prompt, once for each sample that has ended.",
    "vllm:request_generation_tokens": "Tokens generated, once for each sample that has ended.",
    "vllm:request_params_max_tokens": "The max_tokens of a request, once for each sample that has ended.",
    "vllm:request_params_n": "The n of a request.",
}


@dataclass(frozen=True)
class EngineStats:
    """The first two groups are of now, the others since the start."""

    running: int  # sequences: a request has one for each of its n samples
    loading: int  # running sequences with blocks on the way from the host
    waiting: int
    preempted: int  # waiting sequences that have run before

    num_blocks: int
    blocks_running: int  # held by sequences
    blocks_idle: int  # cached, and held by none
    blocks_free: int  # neither
    blocks_watermark: int  # that admitting a sequence beside others leaves free or idle
    num_host_blocks: int
    blocks_on_host: int  # cached there

    out_of_blocks: int  # how often a sequence needed blocks, and too few were free: a waiting one in each step
    preemptions: int
    blocks_copied: int
    blocks_stored: int
    blocks_loaded: int
    prefix_queries: int  # tokens of sequences that were admitted
    prefix_hits: int  # and how many of them were cached

    prompt_tokens: int  # of prompts that were computed or cached
    cached_tokens: int  # of these, cached
    generation_tokens: int

    def __str__(self) -> str:
        share = f"{self.prefix_hits / self.prefix_queries:.0%}" if self.prefix_queries else "none"
        return (
            f"running {self.running} ({self.loading} loading), waiting {self.waiting} ({self.preempted} preempted)"
            f" | blocks: {self.blocks_running} running, {self.blocks_idle} idle, {self.blocks_free} free"
            f" of {self.num_blocks}, watermark {self.blocks_watermark}, {self.blocks_on_host} on the host"
            f" | {self.preemptions} preemptions, {self.out_of_blocks} times out of blocks, {self.blocks_copied} copied,"
            f" {self.blocks_stored} stored, {self.blocks_loaded} loaded"
            f" | prefix hits: {share} | tokens: {self.prompt_tokens} prompt, {self.generation_tokens} generated"
        )


def collect(engine: "LLMEngine") -> EngineStats:
    """Read the statistics from the engine's parts. Any thread may call this: lists are copied before they are read.

    In another thread than the engine's, a sequence that ends meanwhile may be counted twice, or not at all.
    """
    manager, scheduler, tally, host = engine.kv_cache_manager, engine.scheduler, engine.tally, engine.host_tier
    running, waiting = list(scheduler.running), list(scheduler.waiting)
    ref_counts, cached = list(manager.pool.ref_counts), list(manager.pool.hashes)
    blocks_running = manager.num_blocks - ref_counts.count(0)
    blocks_idle = sum(ref_counts[block] == 0 for block in cached)
    live = [seq for samples in list(engine.requests.values()) for seq in samples if not seq.finished]
    prompts = [prompt_tokens_of(seq) for seq in live]
    return EngineStats(
        running=len(running) + sum(len(seq.to_fork) for seq in running),
        loading=sum(not manager.is_ready(seq) for seq in running),
        waiting=len(waiting) + sum(len(seq.to_fork) for seq in waiting),
        preempted=sum(seq.num_preemptions > 0 for seq in waiting),
        num_blocks=manager.num_blocks,
        blocks_running=blocks_running,
        blocks_idle=blocks_idle,
        blocks_free=manager.num_blocks - blocks_running - blocks_idle,
        blocks_watermark=scheduler.watermark_blocks,
        num_host_blocks=host.num_blocks,
        blocks_on_host=len(host.pool.cached),
        out_of_blocks=tally.num_out_of_blocks + scheduler.num_failed,
        preemptions=scheduler.num_preemptions,
        blocks_copied=engine.kv_cache.num_blocks_copied,
        blocks_stored=host.num_blocks_stored,
        blocks_loaded=host.num_blocks_loaded,
        prefix_queries=manager.prefix_cache_stats.queries,
        prefix_hits=manager.prefix_cache_stats.hits,
        prompt_tokens=tally.prompt_tokens + sum(tokens for tokens, _ in prompts),
        cached_tokens=tally.cached_tokens + sum(cached for _, cached in prompts),
        generation_tokens=tally.generation_tokens + sum(seq.num_output_tokens for seq in live),
    )


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
        """Count a value."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def with_more(self, values: Iterable[float]) -> "Observations":
        """Return a copy to which `values` are added."""
        copy = Observations(self._bounds)
        copy._counts, copy._sum = self._counts.copy(), self._sum
        for value in values:
            copy.add(value)
        return copy

    def histogram(self, name: str, labels: dict[str, str]) -> Histogram:
        """Return a Histogram. Its buckets add up: each counts the ones before it too."""
        buckets, total = {}, 0
        for bound, count in zip([*map(bound_name, self._bounds), "+Inf"], self._counts, strict=True):
            buckets[bound] = total = total + count
        return Histogram(name, labels, total, self._sum, buckets)


def bound_name(bound: float) -> str:
    """Return the name of a bucket.

    >>> bound_name(5)
    '5.0'
    """
    return str(float(bound))


@dataclass
class Lookups:
    """Tokens looked up in the prefix cache when sequences are admitted: as in vLLM, not when one comes back."""

    queries: int = 0
    hits: int = 0  # cached on the device
    host_queries: int = 0  # the others, where there is a host's pool
    host_hits: int = 0


class Tally:
    """An Observer that counts sequences as they come and go. Those that run are counted when somebody asks."""

    def __init__(self, max_model_len: int, block_size: int, enable_prefix_caching: bool, has_host: bool) -> None:
        self.ended: Counts[str] = Counts()  # by finish_reason
        self.prompt_tokens = self.cached_tokens = self.generation_tokens = 0
        self.num_out_of_blocks = 0
        self.lookups = Lookups()
        self._block_size, self._enable_prefix_caching, self._has_host = block_size, enable_prefix_caching, has_host
        tokens = up_to(max_model_len)
        self.observed = {
            "vllm:request_prompt_tokens": Observations(tokens),
            "vllm:request_generation_tokens": Observations(tokens),
            "vllm:request_params_max_tokens": Observations(tokens),
            "vllm:request_params_n": Observations(SAMPLES),
            "vllm:time_to_first_token_seconds": Observations(TO_FIRST_TOKEN),
            "vllm:request_time_per_output_token_seconds": Observations(PER_TOKEN),
            "vllm:e2e_request_latency_seconds": Observations(SECONDS),
            "vllm:request_queue_time_seconds": Observations(SECONDS),
        }

    def on_admit(self, seq: Sequence, hits: list[int | None]) -> None:
        """Count the first admission of `seq`, which shares its blocks with the samples that it carries."""
        if seq.num_preemptions > 0:
            return
        seconds = time.perf_counter() - seq.metrics.arrival_time
        for _ in [seq, *seq.to_fork]:
            self._observe("request_queue_time_seconds", seconds)
        if not self._enable_prefix_caching or not seq.may_hit:
            return
        on_host = hits.count(None) * self._block_size
        on_device = len(hits) * self._block_size - on_host
        self.lookups.queries += seq.num_tokens
        self.lookups.hits += on_device
        self.lookups.host_queries += seq.num_tokens - on_device if self._has_host else 0
        self.lookups.host_hits += on_host

    def on_wait(self, seq: Sequence, why: str, needed: int, free: int) -> None:
        """Count a step in which the first in the queue lacked blocks."""
        self.num_out_of_blocks += why == "blocks"

    def on_preempt(self, seq: Sequence, makes_room_for: Sequence | None) -> None:
        """Count a preemption, unless a step failed."""
        self.num_out_of_blocks += makes_room_for is not None

    def on_finish(self, seq: Sequence) -> None:
        """Count a sequence that has ended."""
        prompt_tokens, cached_tokens = prompt_tokens_of(seq)
        self.ended[str(seq.finish_reason)] += 1
        self.generation_tokens += seq.num_output_tokens
        self.prompt_tokens += prompt_tokens
        self.cached_tokens += cached_tokens
        self._observe("request_prompt_tokens", seq.num_prompt_tokens)
        self._observe("request_generation_tokens", seq.num_output_tokens)
        self._observe("request_params_max_tokens", seq.max_num_tokens - seq.num_prompt_tokens)
        if seq.sample_index == 0:
            self._observe("request_params_n", seq.params.n)
        times = seq.metrics
        assert times.finished_time is not None, f"request {seq.request_id} has not ended"
        self._observe("e2e_request_latency_seconds", times.finished_time - times.arrival_time)
        if times.first_token_time is not None:
            self._observe("time_to_first_token_seconds", times.first_token_time - times.arrival_time)
            if seq.num_output_tokens > 1:
                seconds = (times.finished_time - times.first_token_time) / (seq.num_output_tokens - 1)
                self._observe("request_time_per_output_token_seconds", seconds)

    def histograms(self, live: Iterable[Sequence], labels: dict[str, str]) -> list[Histogram]:
        """Return histograms of the sequences that have ended, and of the first tokens of `live` ones."""
        name = "vllm:time_to_first_token_seconds"
        seconds = [
            seq.metrics.first_token_time - seq.metrics.arrival_time
            for seq in live
            if seq.metrics.first_token_time is not None
        ]
        observed = self.observed | {name: self.observed[name].with_more(seconds)}
        return [each.histogram(name, labels.copy()) for name, each in observed.items()]

    def _observe(self, name: str, value: float) -> None:
        self.observed[f"vllm:{name}"].add(value)


def prompt_tokens_of(seq: Sequence) -> tuple[int, int]:
    """Return the tokens of its prompt once they are computed, and how many of them were cached.

    They count for the first sample of a request alone.
    """
    if seq.sample_index > 0 or seq.metrics.first_token_time is None:
        return 0, 0
    return seq.num_prompt_tokens, seq.num_cached_tokens


def up_to(most: int) -> tuple[int, ...]:
    """Return the bounds of a histogram of tokens.

    >>> up_to(64), up_to(0)
    ((1, 2, 5, 10, 20, 50), ())
    """
    bounds = (digit * 10**power for power in range(len(str(most))) for digit in (1, 2, 5))
    return tuple(bound for bound in bounds if bound <= most)


def get_metrics(engine: "LLMEngine", model_name: str) -> list[Metric]:
    """Return the engine's counts under vLLM's names. To vLLM a block on the host is external."""
    stats, lookups, block_bytes = collect(engine), engine.tally.lookups, engine.kv_cache.blocks[0].nbytes
    labels = {"model_name": model_name, "engine": "0"}
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
        "kv_offload_load_bytes": stats.blocks_loaded * block_bytes,
        "kv_offload_store_bytes": stats.blocks_stored * block_bytes,
        "num_preemptions": stats.preemptions,
        "prompt_tokens": stats.prompt_tokens,
        "prompt_tokens_cached": stats.cached_tokens,
        "generation_tokens": stats.generation_tokens,
    }
    metrics: list[Metric] = [Gauge(f"vllm:{name}", labels.copy(), float(value)) for name, value in gauges.items()]
    metrics += [Counter(f"vllm:{name}", labels.copy(), value) for name, value in counters.items()]
    for reason in ("stop", "length", "abort", "error", "repetition"):
        ended = labels | {"finished_reason": reason}
        metrics.append(Counter("vllm:request_success", ended, engine.tally.ended[reason]))
    live = [seq for samples in list(engine.requests.values()) for seq in samples if not seq.finished]
    return metrics + engine.tally.histograms(live, labels)
