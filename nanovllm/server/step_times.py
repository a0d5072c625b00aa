"""TimedEngine counts in each step. An LLMEngine by itself counts those who come and go, and pays for no more."""

import time
from typing import Any, cast

from ..api import LLMEngine
from ..api.counting import CountedSequence
from ..api.metrics import Observations
from ..api.tally import A_TOKEN, STEP_TOKENS
from ..backends.torch.model_runner import Scheduled
from ..engine.sequence import Sequence


class TimedEngine(LLMEngine):
    """It has two histograms more: tokens of a step, and seconds between two tokens of a sequence."""

    def __init__(self, *of_the_engine: Any) -> None:
        super().__init__(*of_the_engine)
        self._step_tokens, self._gaps = Observations(STEP_TOKENS), Observations(A_TOKEN)
        self.tally.observed["vllm:iteration_tokens_total"] = self._step_tokens
        self.tally.observed["vllm:inter_token_latency_seconds"] = self._gaps

    def _update(self, batch: list[Scheduled], tokens: list) -> list[Sequence]:
        updated = super()._update(batch, tokens)
        if batch:
            self._step_tokens.add(sum(num_tokens for _, num_tokens in batch))
        now = time.perf_counter()
        for seq in cast(list[CountedSequence], updated):
            if seq.last_token_time is not None and not seq.error:
                self._gaps.add(now - seq.last_token_time)
            seq.last_token_time = now
        return updated
