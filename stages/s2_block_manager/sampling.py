"""SamplingParams, and the sampler, which chooses one token for each row of logits."""

import hashlib
import math
from collections import abc
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .checks import AT_LEAST_1, SEED, Rule, check_fields
from .flags import knob

RULES: dict[str, Rule] = {
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


def sample(logits: Tensor, rows: list[SamplingRow]) -> list[SampledToken]:
    """Choose one token for each row. logits [num_rows, vocab_size]

    Raises FloatingPointError, naming the row, if a row has no probabilities: NaN, +inf or nothing but -inf in it.
    """
    assert logits.dim() == 2 and logits.shape[0] == len(rows), (logits.shape, len(rows))
    logits = logits.float()
    tokens = logits.argmax(dim=-1)  # [num_rows]
    random_rows = [i for i, row in enumerate(rows) if row.params.temperature > 0]
    if random_rows:
        index = torch.tensor(random_rows, device=logits.device)
        chosen = race(logits[index], [rows[i] for i in random_rows])
        tokens = tokens.index_copy(0, index, chosen)
    normalizers = logits.logsumexp(dim=-1)  # [num_rows]
    for i, normalizer in enumerate(normalizers.tolist()):
        if not math.isfinite(normalizer):  # exactly then; argmax has made some token of such a row all the same
            raise FloatingPointError(f"the logits of row {i} are NaN, infinite or all -inf: no token can be sampled")
    logprobs = logits.gather(1, tokens.unsqueeze(1)).squeeze(1) - normalizers  # [num_rows]
    return [SampledToken(*pair) for pair in zip(tokens.tolist(), logprobs.tolist(), strict=True)]


def race(logits: Tensor, rows: list[SamplingRow]) -> Tensor:
    """Sample each row by an exponential race: the token with the largest p / Exp(1) wins with probability p.

    Noise of 1e-5 in the logits almost never changes the winner, where inverting the cumulative distribution would
    shift every token behind the noise. logits float32 [num_rows, vocab_size] -> int64 [num_rows]
    """
    temperature = torch.tensor([row.params.temperature for row in rows], device=logits.device)  # [num_rows]
    logits = logits / temperature.clamp(min=1e-5).unsqueeze(1)
    logits = apply_top_k_top_p(logits, [row.params for row in rows])
    noise = torch.stack([exponential_noise(row, logits.shape[1]) for row in rows])  # [num_rows, vocab_size]
    return (logits.softmax(dim=-1) / noise.to(logits.device)).argmax(dim=-1)


def exponential_noise(row: SamplingRow, vocab_size: int) -> Tensor:
    """Draw Exp(1), float32 [vocab_size], as a function of (seed, sample index, position) and of nothing else.

    There is no generator whose state moves: a row's noise is the same whatever runs beside it, and a sequence that is
    computed again draws the same tokens again. It is made on the CPU, so that every device draws the same.
    """
    key = f"{row.seed},{row.sample_index},{row.position}".encode()
    seed = int.from_bytes(hashlib.blake2b(key, digest_size=4).digest())  # torch's CPU generator keeps 32 bits
    generator = torch.Generator().manual_seed(seed)
    return torch.empty(vocab_size).exponential_(generator=generator).clamp_(min=1e-30)


def apply_top_k_top_p(logits: Tensor, params: list[SamplingParams]) -> Tensor:
    """Set to -inf what top_k leaves out, then what top_p leaves out. logits, out [num_rows, vocab_size]

    >>> two = SamplingParams(top_k=2), SamplingParams(top_p=0.6)
    >>> apply_top_k_top_p(torch.tensor([[1.0, 3.0, 2.0], [0.0, 1.0, 2.0]]), list(two)).tolist()
    [[-inf, 3.0, 2.0], [-inf, -inf, 2.0]]
    """
    vocab_size = logits.shape[1]
    if all(p.top_k in (0, vocab_size) and p.top_p == 1 for p in params):
        return logits
    top_k = torch.tensor([min(p.top_k or vocab_size, vocab_size) for p in params], device=logits.device)
    top_p = torch.tensor([p.top_p if p.top_p < 1 else math.inf for p in params], device=logits.device)
    ordered, tokens = logits.sort(dim=-1, descending=True, stable=True)  # [num_rows, vocab_size]
    rank = torch.arange(vocab_size, device=logits.device)  # [vocab_size]
    ordered = ordered.masked_fill(rank >= top_k.unsqueeze(1), float("-inf"))
    probs = ordered.softmax(dim=-1)
    before = probs.cumsum(dim=-1) - probs  # of all likelier tokens; rounding may take it past 1
    ordered = ordered.masked_fill((before >= top_p.unsqueeze(1)) & (rank > 0), float("-inf"))
    return torch.empty_like(logits).scatter_(1, tokens, ordered)
