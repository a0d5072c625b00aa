"""The results of generate() and stream(), with vLLM's names: one RequestOutput for each prompt."""

from dataclasses import dataclass


@dataclass(frozen=True)
class CompletionOutput:
    """A generated text."""

    index: int  # among the samples of one prompt
    text: str  # without the end-of-text token, and cut at a stop string
    token_ids: list[int]  # all sampled tokens, including the one that ended the text
    cumulative_logprob: float  # natural log, of the raw logits
    finish_reason: str | None = None  # "stop" | "length" | "abort" | "error"; None while it runs


@dataclass
class RequestMetrics:
    """Times in seconds, on the clock of time.perf_counter()."""

    arrival_time: float
    first_token_time: float | None = None
    finished_time: float | None = None


@dataclass(frozen=True)
class RequestOutput:
    """A request and its texts so far."""

    request_id: str
    prompt: str | None  # None if the prompt was token ids
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics
    error: str | None = None  # why the request could not be served
