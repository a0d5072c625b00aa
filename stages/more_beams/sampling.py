"""SamplingParams, and the sampler: from a row of logits to one token.

A token is drawn by an exponential race: divide the probabilities p by Exp(1) noise, and the largest wins, token i with
probability p[i] (the Gumbel-max trick in another form; Maddison et al. 2014, arXiv:1411.0030). The noise of a row is a
function of (seed, sample_index, position), so a request gets the same tokens alone and in a batch, and there is no
generator whose state would have to be saved.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from .config import option


@dataclass(frozen=True)
class SamplingParams:
    """The options of a request."""

    n: int = option(1, "samples of each prompt")
    temperature: float = option(1.0, "0: the most likely token; above 1: flatter than the model's distribution")
    top_k: int = option(0, "sample from the k most likely tokens; 0: from all")
    top_p: float = option(1.0, "sample from the fewest tokens whose probabilities sum to p")
    max_tokens: int = option(16, "maximum number of tokens to generate")
    seed: int | None = None  # None: one drawn by the engine
    stop: str | Sequence[str] = ()  # strings that end the output; it is cut before them
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        """Raise ValueError for an invalid value."""
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))  # the dataclass is frozen
        if self.n < 1:
            raise ValueError(f"n must be at least 1, not {self.n}")
        if not self.temperature >= 0:
            raise ValueError(f"temperature must be 0 or above, not {self.temperature}")
        if self.top_k < 0:
            raise ValueError(f"top_k must be 0 (all) or above, not {self.top_k}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be above 0 and at most 1, not {self.top_p}")
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, not {self.max_tokens}")
        if "" in self.stop:
            raise ValueError("stop must not contain an empty string: it would end every output at once")


class SamplingRow(NamedTuple):
    """The sampler's inputs for one row of logits, besides the logits."""

    params: SamplingParams
    seed: int
    sample_index: int  # among the samples of one prompt
    position: int  # of the token to be sampled


class SampledToken(NamedTuple):
    """A token, and how likely the model found it."""

    token_id: int
    logprob: float  # natural log, of the raw logits


def sample(logits: Tensor, rows: list[SamplingRow]) -> list[SampledToken]:
    """Return one token for each row of logits [num_rows, vocab_size]."""
    logits = logits.float()
    tokens = torch.stack([sample_row(logits[i], row) for i, row in enumerate(rows)])  # [num_rows]
    logprobs = logits.log_softmax(dim=-1).gather(1, tokens.unsqueeze(1)).squeeze(1)  # [num_rows]
    return [SampledToken(*pair) for pair in zip(tokens.tolist(), logprobs.tolist(), strict=True)]


def sample_row(logits: Tensor, row: SamplingRow) -> Tensor:
    """Return the token of one row, int64 [], for float32 logits [vocab_size]."""
    params = row.params
    if params.temperature == 0:
        return logits.argmax()
    probs = (logits / max(params.temperature, 1e-5)).softmax(dim=-1)
    if params.top_k or params.top_p < 1:
        probs = keep_most_likely(probs, params.top_k or len(probs), params.top_p)
    return (probs / exponential_noise(row, len(probs)).to(probs.device)).argmax()


def keep_most_likely(probs: Tensor, top_k: int, top_p: float) -> Tensor:
    """Keep the top_k most likely tokens, then the fewest of them that sum to a share top_p. Zero the others.

    >>> keep_most_likely(torch.tensor([0.1, 0.4, 0.2, 0.3]), top_k=3, top_p=0.5)
    tensor([0.0000, 0.4000, 0.0000, 0.3000])
    """
    ordered, tokens = probs.sort(descending=True, stable=True)
    ordered[top_k:] = 0
    before = ordered.cumsum(dim=0) - ordered  # total probability of all tokens that are more likely
    ordered[1:][before[1:] >= top_p * ordered.sum()] = 0
    return torch.empty_like(probs).scatter_(0, tokens, ordered)


def exponential_noise(row: SamplingRow, vocab_size: int) -> Tensor:
    """Return the Exp(1) noise of a row, float32 [vocab_size]: the same for the same seed, sample index and position."""
    key = f"{row.seed},{row.sample_index},{row.position}".encode()
    generator = torch.Generator().manual_seed(int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), signed=True))
    return torch.empty(vocab_size).exponential_(generator=generator)
