"""The values that the engine and its backends exchange: a row of logits to sample, and the sampled token."""

from typing import NamedTuple

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


RowOutput = SampledToken | PoolerOutput  # a step has one for each sequence whose last token it computes
