"""RequestOutput and EmbeddingRequestOutput, the results for one prompt, with vLLM's names."""

import time
from collections.abc import Mapping
from dataclasses import dataclass

from ..checkpoints.stream_decoder import MAX_BEFORE, decoded_token
from ..checkpoints.tokenizer import HFTokenizer
from .tokens import Logprob

Position = dict[int, Logprob]  # by token id: the likeliest tokens at one position, and its actual token


@dataclass
class CompletionOutput:
    """One sample for a prompt."""

    index: int  # of this sample among those of the prompt
    text: str  # without EOS, and cut at a stop string
    token_ids: list[int]  # all sampled tokens, including the one that ended the text
    cumulative_logprob: float  # natural log, of the raw logits
    finish_reason: str | None = None  # "stop" | "length" | "abort" | "error" | "repetition"; None while it runs
    logprobs: list[Position] | None = None
    stop_reason: str | int | None = None  # the stop string or stop token that ended the text; None for EOS
    lora_request: None = None

    def finished(self) -> bool:
        """Return True once no more tokens can come."""
        return self.finish_reason is not None


@dataclass(frozen=True)
class RequestMetrics:
    """Times in seconds, on the clock of time.perf_counter()."""

    arrival_time: float
    first_token_time: float | None = None
    finished_time: float | None = None


@dataclass
class RequestOutput:
    """A request and its samples so far."""

    request_id: str
    prompt: str | None  # None if the prompt was only token ids
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]  # the samples
    finished: bool
    metrics: RequestMetrics
    error: str | None = None  # why the request failed
    prompt_logprobs: list[Position | None] | None = None  # one for each token of the prompt; None for the first
    num_cached_tokens: int = 0  # tokens of the prompt that were in the prefix cache
    lora_request: None = None
    embedding: list[float] | None = None  # of the prompt, for a request with PoolingParams

    @classmethod
    def failed(cls, request_id: str, prompt: object, error: str) -> "RequestOutput":
        """Return the output of a request that could not be served. The prompt may have any type."""
        text = prompt.get("prompt") if isinstance(prompt, Mapping) else prompt
        token_ids = prompt.get("prompt_token_ids") if isinstance(prompt, Mapping) else prompt
        now = time.perf_counter()
        return cls(
            request_id=request_id,
            prompt=text if isinstance(text, str) else None,
            prompt_token_ids=list(token_ids) if isinstance(token_ids, list | tuple) else [],
            outputs=[CompletionOutput(index=0, text="", token_ids=[], cumulative_logprob=0.0, finish_reason="error")],
            finished=True,
            metrics=RequestMetrics(now, finished_time=now),
            error=error,
        )


@dataclass(frozen=True)
class EmbeddingOutput:
    """The embedding of a prompt, normalized unless use_activation is False."""

    embedding: list[float]


@dataclass(frozen=True)
class EmbeddingRequestOutput:
    """A finished request for an embedding."""

    request_id: str
    outputs: EmbeddingOutput
    prompt_token_ids: list[int]
    finished: bool = True
    num_cached_tokens: int = 0  # tokens of the prompt that were in the prefix cache

    @classmethod
    def from_base(cls, output: RequestOutput) -> "EmbeddingRequestOutput":
        """Convert the final output of a request. Raise ValueError if the request failed or was aborted."""
        if output.embedding is None:
            raise ValueError(output.error or f"request {output.request_id} was aborted")
        embedding, num_cached = EmbeddingOutput(output.embedding), output.num_cached_tokens
        return cls(output.request_id, embedding, output.prompt_token_ids, num_cached_tokens=num_cached)


def with_decoded_tokens(position: Position, preceding_tokens: list[int], tokenizer: HFTokenizer) -> Position:
    """Return `position` with the text of each token, which may depend on the last MAX_BEFORE of `preceding_tokens`."""
    preceding_tokens = preceding_tokens[-MAX_BEFORE:]
    return {
        token_id: logprob._replace(decoded_token=decoded_token(token_id, preceding_tokens, tokenizer))
        for token_id, logprob in position.items()
    }
