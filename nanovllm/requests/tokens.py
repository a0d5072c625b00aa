"""The values that the engine and its backends exchange: a row of logits to sample, and the sampled token."""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, Self

from .sampling_params import SamplingParams


class SamplingRow(NamedTuple):
    """The sampler's input for one row, in addition to the logits."""

    params: SamplingParams
    seed: int  # of the request, or drawn when the request arrived
    sample_index: int  # of this sample among those of its prompt
    position: int  # of the token to be sampled, in the whole sequence


class Logprob(NamedTuple):
    """The log-probability of a token, and its rank among all tokens."""

    logprob: float  # natural log, of the raw logits
    rank: int  # 1 is the likeliest
    decoded_token: str | None = None  # the text of the token, if there is a tokenizer


class SampledToken(NamedTuple):
    """A token, and how likely the model considered it."""

    token_id: int
    logprob: float  # natural log, of the raw logits
    logprobs: dict[int, Logprob] | None = None  # of this token and the likeliest ones, if the request asks for them


class PoolerOutput(NamedTuple):
    """The embedding of a prompt."""

    embedding: list[float]  # float32 values, [hidden_size]


class RowError(NamedTuple):
    """The error that a sequence raised when it was computed alone."""

    error: str


RowOutput = SampledToken | PoolerOutput | RowError  # a step has one for each sequence whose last token it computes
NO_TOKEN = -1  # of a row whose sequence has more tokens to compute first, or of an embedding


class StepOutput(NamedTuple):
    """The results of a step or of a sampler, as columns with a number for each row.

    A column arrives from a device in one piece, so the host need not make an object for each row. Only rows that are
    more than a token (an embedding, log-probabilities, an error) have one, in `others`.
    """

    token_ids: list[int]  # NO_TOKEN for a row without a token
    logprobs: list[float]
    others: Mapping[int, RowOutput] = {}  # by row

    @classmethod
    def of(cls, rows: Iterable[RowOutput | None]) -> Self:
        """Return rows as columns.

        >>> StepOutput.of([SampledToken(7, -0.5), None])
        StepOutput(token_ids=[7, -1], logprobs=[-0.5, 0.0], others={})
        """
        token_ids, logprobs, others = list[int](), list[float](), dict[int, RowOutput]()
        for number, row in enumerate(rows):
            token_ids.append(row.token_id if isinstance(row, SampledToken) else NO_TOKEN)
            logprobs.append(row.logprob if isinstance(row, SampledToken) else 0.0)
            if isinstance(row, PoolerOutput | RowError) or (row is not None and row.logprobs is not None):
                others[number] = row
        return cls(token_ids, logprobs, others)

    def spread(self, places: Sequence[int], num_rows: int, more: Mapping[int, RowOutput] = {}) -> "StepOutput":
        """Return `num_rows` rows: these rows at `places`, and `more` at the places that it names. The rest are empty.

        >>> StepOutput([7], [-0.5]).spread([1], 2)
        StepOutput(token_ids=[-1, 7], logprobs=[0.0, -0.5], others={})
        """
        if len(places) == num_rows:
            return self
        token_ids, logprobs = [NO_TOKEN] * num_rows, [0.0] * num_rows
        for place, token_id, logprob in zip(places, self.token_ids, self.logprobs, strict=True):
            token_ids[place], logprobs[place] = token_id, logprob
        return StepOutput(token_ids, logprobs, {places[row]: other for row, other in self.others.items()} | {**more})

    def row(self, number: int) -> RowOutput | None:
        """Return the result of one row, or None if its sequence has more tokens to compute."""
        if number in self.others:
            return self.others[number]
        token_id = self.token_ids[number]
        return None if token_id == NO_TOKEN else SampledToken(token_id, self.logprobs[number])
