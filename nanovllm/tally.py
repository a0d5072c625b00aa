"""Tally: an Observer that counts what the parts of the engine do not count, in metrics with vLLM's names.

It costs nothing in a step in which no sequence is admitted, drafts, runs out of blocks or ends.
"""

import time
from collections import Counter as Counts
from collections.abc import Iterable
from weakref import WeakKeyDictionary

from .engine.prefix_cache import PrefixCacheStats
from .engine.sequence import Sequence
from .metrics import PER_TOKEN, SAMPLES_PER_REQUEST, SECONDS, TO_FIRST_TOKEN, Histogram, Observations, token_bounds


class Tally:
    """An Observer that counts sequences when they are admitted and when they finish."""

    def __init__(
        self,
        max_model_len: int,
        block_size: int,
        enable_prefix_caching: bool,
        has_tier: bool,
        num_speculative_tokens: int,
    ) -> None:
        self.ended: Counts[str] = Counts()  # by finish_reason
        self.prompt_tokens = self.cached_tokens = self.generation_tokens = 0
        self.num_out_of_blocks = self.num_drafts = self.num_draft_tokens = 0
        self.accepted_by_position = [0] * num_speculative_tokens
        # Tokens looked up on a sequence's first admission, as in vLLM. BlockManager counts them on every admission.
        self.device_lookups, self.host_lookups = PrefixCacheStats(), PrefixCacheStats()
        self._block_size, self._enable_prefix_caching, self._has_tier = block_size, enable_prefix_caching, has_tier
        self._admitted_times: WeakKeyDictionary[Sequence, float] = WeakKeyDictionary()  # of unfinished sequences
        self._lengths: dict[str, list[int]] = {}  # output lengths of ended samples, for each unfinished request
        bounds = token_bounds(max_model_len)
        self.observed = {
            "vllm:request_prompt_tokens": Observations(bounds),
            "vllm:request_generation_tokens": Observations(bounds),
            "vllm:request_max_num_generation_tokens": Observations(bounds),
            "vllm:request_params_max_tokens": Observations(bounds),
            "vllm:request_params_n": Observations(SAMPLES_PER_REQUEST),
            "vllm:time_to_first_token_seconds": Observations(TO_FIRST_TOKEN),
            "vllm:request_time_per_output_token_seconds": Observations(PER_TOKEN),
            "vllm:e2e_request_latency_seconds": Observations(SECONDS),
            "vllm:request_queue_time_seconds": Observations(SECONDS),
            "vllm:request_prefill_time_seconds": Observations(SECONDS),
            "vllm:request_decode_time_seconds": Observations(SECONDS),
            "vllm:request_inference_time_seconds": Observations(SECONDS),
        }

    def on_admit(self, seq: Sequence, hits: list[int | None]) -> None:
        """Count the first admission of `seq` and of the samples that will fork from it."""
        if seq.num_preemptions > 0:
            return
        now = time.perf_counter()
        for sample in [seq, *seq.to_fork]:
            self._observe("request_queue_time_seconds", now - seq.metrics.arrival_time)
            self._admitted_times[sample] = now
        if not self._enable_prefix_caching or not seq.may_hit:
            return
        on_host = hits.count(None) * self._block_size
        on_device = len(hits) * self._block_size - on_host
        self.device_lookups.queries += seq.num_tokens
        self.device_lookups.hits += on_device
        self.host_lookups.queries += seq.num_tokens - on_device if self._has_tier else 0
        self.host_lookups.hits += on_host

    def on_wait(self, seq: Sequence, why: str, needed: int, free: int) -> None:
        """Count a step in which the first waiting sequence needed more blocks than were free."""
        self.num_out_of_blocks += why == "blocks"

    def on_preempt(self, seq: Sequence, makes_room_for: Sequence | None) -> None:
        """Count a preemption, if its reason is that no block was free."""
        self.num_out_of_blocks += makes_room_for is not None

    def on_verify(self, seq: Sequence, num_drafted: int, num_accepted: int) -> None:
        """Count a draft, its tokens, and how many of these were right."""
        self.num_drafts += 1
        self.num_draft_tokens += num_drafted
        for position in range(num_accepted):
            self.accepted_by_position[position] += 1

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
        self._lengths.setdefault(seq.request_id, []).append(seq.num_output_tokens)
        if len(self._lengths[seq.request_id]) == seq.params.n:
            self._observe("request_max_num_generation_tokens", max(self._lengths.pop(seq.request_id)))
        times, admitted_time = seq.metrics, self._admitted_times.pop(seq, None)
        assert times.finished_time is not None, f"request {seq.request_id} is still running"
        self._observe("e2e_request_latency_seconds", times.finished_time - times.arrival_time)
        if admitted_time is not None:
            self._observe("request_inference_time_seconds", times.finished_time - admitted_time)
        if times.first_token_time is not None:
            self._observe("time_to_first_token_seconds", times.first_token_time - times.arrival_time)
            self._observe("request_decode_time_seconds", times.finished_time - times.first_token_time)
            if admitted_time is not None:
                self._observe("request_prefill_time_seconds", times.first_token_time - admitted_time)
            if seq.num_output_tokens > 1:
                seconds = (times.finished_time - times.first_token_time) / (seq.num_output_tokens - 1)
                self._observe("request_time_per_output_token_seconds", seconds)

    def histograms(self, live: Iterable[Sequence], labels: dict[str, str]) -> list[Histogram]:
        """Return the histograms. They cover ended sequences, and the times to the first tokens of `live` sequences."""
        name = "vllm:time_to_first_token_seconds"
        times = (seq.metrics for seq in live)
        seconds = [each.first_token_time - each.arrival_time for each in times if each.first_token_time is not None]
        observed = self.observed | {name: self.observed[name].with_more(seconds)}
        return [each.histogram(name, labels.copy()) for name, each in observed.items()]

    def _observe(self, name: str, value: float) -> None:
        self.observed[f"vllm:{name}"].add(value)


def prompt_tokens_of(seq: Sequence) -> tuple[int, int]:
    """Return the number of prompt tokens, and how many of them were cached.

    Return zeros if the prompt was never computed, and for all samples of a request except the first.
    """
    if seq.sample_index > 0 or seq.metrics.first_token_time is None:
        return 0, 0
    return seq.num_prompt_tokens, seq.num_cached_tokens
