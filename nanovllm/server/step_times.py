"""What the server counts in each step, and an engine by itself does not: it would take time from every step."""

import time
from typing import Any

from ..api import LLMEngine
from ..api.metrics import A_TOKEN, Observations
from ..core.model_runner import Scheduled
from ..core.sequence import Sequence

STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


class StepTimes:
    """Two histograms among the engine's metrics: tokens of a step, and seconds between two tokens of a sequence."""

    def __init__(self, engine: LLMEngine) -> None:
        self._tokens, self._gaps = Observations(STEP_TOKENS), Observations(A_TOKEN)
        engine.tally.observed["vllm:iteration_tokens_total"] = self._tokens
        engine.tally.observed["vllm:inter_token_latency_seconds"] = self._gaps
        self._update = engine._update
        engine._update = self.update  # type: ignore[method-assign]

    def update(self, batch: list[Scheduled], tokens: Any) -> list[Sequence]:
        """In place of the engine's own."""
        updated = self._update(batch, tokens)
        if batch:
            self._tokens.add(sum(num_tokens for _, num_tokens in batch))
        now = time.perf_counter()
        for seq in updated:
            last = getattr(seq, "last_token_time", None)
            if last is not None and not seq.error:
                self._gaps.add(now - last)
            seq.last_token_time = now  # type: ignore[attr-defined]
        return updated
