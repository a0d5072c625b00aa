"""Tally: what has come of the sequences so far, and the bounds of vLLM's histograms."""

import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .metrics import Metric, Observations

if TYPE_CHECKING:
    from ..engine.sequence import Sequence

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
STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


def up_to(most: int) -> tuple[int, ...]:
    """
    >>> up_to(64), up_to(0)
    ((1, 2, 5, 10, 20, 50), ())
    """
    bounds = (digit * 10**power for power in range(len(str(most))) for digit in (1, 2, 5))
    return tuple(bound for bound in bounds if bound <= most)


@dataclass
class Lookups:
    """Tokens looked for in the prefix cache when sequences are admitted: as in vLLM, not when one comes back."""

    queries: int = 0
    hits: int = 0  # found on the device
    host_queries: int = 0  # the others, where there is a host's pool
    host_hits: int = 0

    def add(self, num_tokens: int, on_device: int, on_host: int, has_host: bool) -> None:
        self.queries += num_tokens
        self.hits += on_device
        self.host_queries += num_tokens - on_device if has_host else 0
        self.host_hits += on_host


class Tally:
    """Counts of sequences that have ended. Sequences that run are counted when somebody asks."""

    def __init__(self, max_model_len: int) -> None:
        self.ended: Counter[str] = Counter()  # by finish_reason
        self.prompt_tokens = self.cached_tokens = self.generation_tokens = 0
        self.lookups = Lookups()
        tokens = up_to(max_model_len)
        self.observed = {
            "vllm:request_prompt_tokens": Observations(tokens),
            "vllm:request_generation_tokens": Observations(tokens),
            "vllm:request_params_max_tokens": Observations(tokens),
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
        if seq.sample_index == 0:
            self._observe("request_params_n", seq.params.n)
        times = seq.metrics
        self._observe("e2e_request_latency_seconds", times.finished_time - times.arrival_time)
        if times.first_token_time is not None:
            self._observe("time_to_first_token_seconds", times.first_token_time - times.arrival_time)
            if num_tokens > 1:
                seconds = (times.finished_time - times.first_token_time) / (num_tokens - 1)
                self._observe("request_time_per_output_token_seconds", seconds)

    def histograms(self, live: "Iterable[Sequence]", labels: dict[str, str]) -> list[Metric]:
        """Of those that have ended, and first tokens of `live` ones: they have come, and take no second look."""
        name = "vllm:time_to_first_token_seconds"
        times = [seq.metrics for seq in live if seq.metrics.first_token_time is not None]
        seconds = [each.first_token_time - each.arrival_time for each in times]
        observed = self.observed | {name: self.observed[name].with_more(seconds)}
        return [each.histogram(name, labels.copy()) for name, each in observed.items()]

    def _observe(self, name: str, value: float) -> None:
        self.observed[f"vllm:{name}"].add(value)


def prompt_tokens_of(seq: "Sequence") -> tuple[int, int]:
    """The tokens of its prompt once they are computed, and how many of them were cached. Its first sample has them."""
    if seq.sample_index or seq.metrics.first_token_time is None:
        return 0, 0
    return seq.num_prompt_tokens, getattr(seq, "num_cached_tokens", None) or 0
