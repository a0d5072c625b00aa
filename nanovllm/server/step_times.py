"""StepTimes: an observer that reads a clock in each step. An engine alone counts sequences as they come and go."""

import time

from ..engine.executor import Scheduled
from ..engine.sequence import Sequence
from ..engine.stats import PER_TOKEN, STEP_TOKENS, Histogram, Observations


class StepTimes:
    """Two histograms: tokens of a step, and seconds between two tokens of a sequence."""

    def __init__(self) -> None:
        self._step_tokens, self._gaps = Observations(STEP_TOKENS), Observations(PER_TOKEN)
        self._last_token_times: dict[Sequence, float] = {}  # of sequences that have not ended

    def on_step(self, batch: list[Scheduled], updated: list[Sequence]) -> None:
        """Count a step and its tokens."""
        if batch:
            self._step_tokens.add(sum(num_tokens for _, num_tokens in batch))
        now = time.perf_counter()
        for seq in updated:
            if seq in self._last_token_times and not seq.error:
                self._gaps.add(now - self._last_token_times[seq])
            self._last_token_times[seq] = now

    def on_finish(self, seq: Sequence) -> None:
        """Forget a sequence that has ended."""
        self._last_token_times.pop(seq, None)

    def histograms(self, labels: dict[str, str]) -> list[Histogram]:
        """Return both under vLLM's names."""
        return [
            self._step_tokens.histogram("vllm:iteration_tokens_total", labels.copy()),
            self._gaps.histogram("vllm:inter_token_latency_seconds", labels.copy()),
        ]
