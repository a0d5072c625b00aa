"""RequestOutput, one for each prompt, with vLLM's names, and the log-probabilities in it."""

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..backends.torch.sampler import Logprob
from ..checkpoints.tokenizer import MAX_BEFORE, HFTokenizer, decoded_token

Place = dict[int, Logprob] | None  # tokens that may be at one place; None for the first token of a prompt


@dataclass(frozen=True)
class CompletionOutput:
    """One sample of a prompt."""

    index: int  # among the samples of one prompt
    text: str  # without the end-of-text token, and cut at a stop string
    token_ids: list[int]  # everything sampled, the token that stopped it too
    cumulative_logprob: float  # natural log, of the raw logits
    finish_reason: str | None = None  # "stop" | "length" | "abort" | "error" | "repetition"; None: more is to come
    logprobs: "list[dict[int, Logprob]] | FlatLogprobs | None" = None  # likeliest tokens of each place, and its own
    stop_reason: str | int | None = None  # the stop string or the stop token that ended it; None for the EOS token
    lora_request: None = None

    def finished(self) -> bool:
        """Return whether no more tokens come."""
        return self.finish_reason is not None


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
    prompt_logprobs: "list[Place] | FlatLogprobs | None" = None  # like the outputs'; None for the first token
    num_cached_tokens: int = 0  # of the prompt, that were computed before
    lora_request: None = None

    @classmethod
    def failed(cls, request_id: str, prompt: object, error: str) -> "RequestOutput":
        """Return the output of a request that could not be served; `prompt` may be of any type."""
        text = prompt.get("prompt") if isinstance(prompt, Mapping) else prompt
        ids = prompt.get("prompt_token_ids") if isinstance(prompt, Mapping) else prompt
        now = time.perf_counter()
        return cls(
            request_id=request_id,
            prompt=text if isinstance(text, str) else None,
            prompt_token_ids=list(ids) if isinstance(ids, list | tuple) else [],
            outputs=[CompletionOutput(index=0, text="", token_ids=[], cumulative_logprob=0.0, finish_reason="error")],
            finished=True,
            metrics=RequestMetrics(now, finished_time=now),
            error=error,
        )


class FlatLogprobs(Sequence[Place]):
    """The log-probabilities of an output in a few long lists.

        place 0 | place 1  | place 2        starts  0 2 5
        a  b    | c  a  d  | b  a           token_ids, logprobs, ranks and decoded_tokens: of a b c a d b a

    It reads as a list of dicts does. A list of dicts is many objects that Python's garbage collector walks over again
    and again; this is a few, however long the output is.
    """

    def __init__(self, places: Iterable[Place] = ()) -> None:
        self.start_indices: list[int] = []
        self.end_indices: list[int] = []
        self.token_ids: list[int] = []
        self.logprobs: list[float] = []
        self.ranks: list[int] = []
        self.decoded_tokens: list[str | None] = []
        self.extend(places)

    def append(self, place: Place) -> None:
        """Add the tokens of the next place."""
        self.start_indices.append(len(self.token_ids))
        for token_id, entry in (place or {}).items():
            self.token_ids.append(token_id)
            self.logprobs.append(entry.logprob)
            self.ranks.append(entry.rank)
            self.decoded_tokens.append(entry.decoded_token)
        self.end_indices.append(len(self.token_ids))

    def extend(self, places: Iterable[Place]) -> None:
        """Add several places."""
        for place in places:
            self.append(place)

    def __len__(self) -> int:
        return len(self.start_indices)

    def __getitem__(self, place: Any) -> Any:
        """Return a dict for a place; FlatLogprobs for a slice."""
        if isinstance(place, slice):
            return FlatLogprobs(self[each] for each in range(*place.indices(len(self))))
        entries = slice(self.start_indices[place], self.end_indices[place])
        columns = (self.logprobs[entries], self.ranks[entries], self.decoded_tokens[entries])
        return dict(zip(self.token_ids[entries], map(Logprob, *columns), strict=True))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, FlatLogprobs) and vars(self) == vars(other)

    __hash__ = None  # type: ignore[assignment]


def with_decoded_tokens(place: dict[int, Logprob], before: list[int], tokenizer: HFTokenizer) -> dict[int, Logprob]:
    """Return `place` with decoded_token. `before` are the last tokens before it; MAX_BEFORE of them suffice."""
    before = before[-MAX_BEFORE:]
    return {
        token_id: entry._replace(decoded_token=decoded_token(token_id, before, tokenizer))
        for token_id, entry in place.items()
    }
