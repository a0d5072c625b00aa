"""What a caller gets back: one RequestOutput a prompt, with vLLM's names."""

import time
from dataclasses import dataclass


@dataclass(frozen=True)
class CompletionOutput:
    index: int  # among the samples of one prompt
    text: str  # without the end-of-text token, and cut at a stop string
    token_ids: list[int]  # everything sampled, the token that stopped it too
    cumulative_logprob: float  # natural log, of the raw logits
    finish_reason: str | None = None  # "stop" | "length" | "abort" | "error"; None: there is more to come


@dataclass(frozen=True)
class RequestMetrics:
    """Seconds on time.perf_counter's clock."""

    arrival_time: float
    first_token_time: float | None = None
    finished_time: float | None = None


@dataclass(frozen=True)
class RequestOutput:
    request_id: str
    prompt: str | None  # None if the prompt came as token ids
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics
    error: str | None = None  # why the request could not be served

    @classmethod
    def failed(cls, request_id: str, prompt: str | list[int], error: str) -> "RequestOutput":
        """Return the output of a request that could not be served; `prompt` may be of any type."""
        text = prompt if isinstance(prompt, str) else None
        token_ids = list(prompt) if isinstance(prompt, list | tuple) else []
        now = time.perf_counter()
        empty = CompletionOutput(index=0, text="", token_ids=[], cumulative_logprob=0.0, finish_reason="error")
        return cls(request_id, text, token_ids, [empty], True, RequestMetrics(now, finished_time=now), error)
