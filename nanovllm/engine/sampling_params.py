"""SamplingParams: how the tokens of a request are chosen, and when they end."""

from collections import abc
from dataclasses import dataclass
from typing import Any, NamedTuple

from .checks import AT_LEAST_1, SEED, Rule, check_fields
from .flags import knob

RULES: dict[str, Rule] = {
    "n": ("a whole number, at least 1, and at most 16,384", lambda n: 1 <= n <= 1 << 14),  # all are made on arrival
    "temperature": ("0 or above", lambda temperature: temperature >= 0),
    "top_k": ("a whole number, 0 (all) or above", lambda k: k >= 0),
    "top_p": ("above 0 and at most 1", lambda p: 0 < p <= 1),
    "max_tokens": AT_LEAST_1,
    "seed": SEED,
    "stop": ("a text or several, none of them empty", all),
    "stop_token_ids": ("a list of whole numbers", lambda token_ids: True),
}


@dataclass(frozen=True)
class SamplingParams:
    n: int = knob(1, "samples of each prompt")
    temperature: float = knob(1.0, "0 takes the likeliest token; above 1 flattens the distribution")
    top_k: int = knob(0, "sample from the k likeliest tokens only; 0: from all")
    top_p: float = knob(1.0, "sample from the fewest tokens whose probabilities sum to p")
    max_tokens: int = knob(16, "most tokens to generate")
    seed: int | None = None  # the same seed and prompt give the same text, alone or in company
    stop: str | abc.Sequence[str] = ()
    stop_token_ids: abc.Sequence[int] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        """Raises ValueError, naming the parameter and its value."""
        object.__setattr__(self, "stop", as_tuple(self.stop))
        object.__setattr__(self, "stop_token_ids", as_tuple(self.stop_token_ids))
        check_fields(self, RULES)


def as_tuple(values: Any) -> Any:
    """A tuple of one text or of several values; what is neither stays as it is, for an error to show.

    >>> as_tuple("end"), as_tuple(["a", "b"]), as_tuple(None), as_tuple(5)
    (('end',), ('a', 'b'), (), 5)
    """
    if values is None or isinstance(values, str):
        return () if values is None else (values,)
    try:
        return tuple(values)
    except TypeError:
        return values


class SamplingRow(NamedTuple):
    """What the sampler must know of one row of logits."""

    params: SamplingParams
    seed: int  # the request's, or one drawn for it on arrival
    sample_index: int  # among the samples of one prompt
    position: int  # of the token to be sampled


class SampledToken(NamedTuple):
    token_id: int
    logprob: float  # natural log, of the raw logits
