"""The sampler: choose one token for each row of logits. race.py draws the tokens that are not greedy."""

import math
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from .logprobs import Logprob
from .race import RowParams, noise_key, race_all, race_likeliest

if TYPE_CHECKING:
    from ...engine.sampling_params import SamplingParams

Kind = Callable[[Tensor, RowParams], Tensor]  # logits [num_rows, vocab_size] -> tokens [num_rows]

MAX_LOGITS = 1 << 20  # sampled from together on a CPU: intermediate results of so many stay in its cache


class SamplingRow(NamedTuple):
    """All that the sampler needs to know about one row of logits."""

    params: "SamplingParams"
    seed: int  # the request's, or one drawn for it on arrival
    sample_index: int  # among the samples of one prompt
    position: int  # of the token to be sampled


class SampledToken(NamedTuple):
    """A token, and how likely the model found it."""

    token_id: int
    logprob: float  # natural log, of the raw logits
    logprobs: dict[int, Logprob] | None = None  # of this token and the likeliest ones, if the request wants them


def sample(logits: Tensor, rows: list[SamplingRow]) -> list[SampledToken]:
    """Return one token for each row. logits [num_rows, vocab_size]

    Raise FloatingPointError, naming the row, if a row has no probabilities: NaN, +inf or nothing but -inf in it.
    """
    assert logits.dim() == 2 and logits.shape[0] == len(rows), (logits.shape, len(rows))
    if logits.device.type == "mps":  # it has no float64, which the noise is made with
        logits = logits.cpu()
    sampled: list[SampledToken] = []
    size = max(1, MAX_LOGITS // logits.shape[1] if logits.device.type == "cpu" else len(rows))
    for start in range(0, len(rows), size):
        part = logits[start : start + size].float()
        logprobs = part.log_softmax(dim=-1)  # [size, vocab_size]
        for i, is_nan in enumerate(logprobs[:, 0].isnan().tolist()):  # if one of a row is, all are
            if is_nan:
                raise FloatingPointError(no_probabilities(start + i))
        tokens = choose(part, rows[start : start + size])  # [size]
        chosen = logprobs.gather(1, tokens.unsqueeze(1)).squeeze(1)
        sampled += [SampledToken(*pair) for pair in zip(tokens.tolist(), chosen.tolist(), strict=True)]
    return sampled


def no_probabilities(row: int) -> str:
    """Return the message of a FloatingPointError."""
    return f"the logits of row {row} are NaN, infinite or all -inf: no token can be sampled"


def choose(logits: Tensor, rows: list[SamplingRow]) -> Tensor:
    """Choose a token for each row. Rows of one kind go together. logits float32 [num_rows, vocab_size] -> [num_rows]"""
    members: dict[Kind, list[int]] = {}
    for i, row in enumerate(rows):
        members.setdefault(kind_of(row.params, logits.shape[1]), []).append(i)
    tokens = torch.empty(len(rows), dtype=torch.int64, device=logits.device)
    for kind, indices in members.items():
        of_kind = logits if len(indices) == len(rows) else logits[indices]
        tokens[indices] = kind(of_kind, row_params([rows[i] for i in indices], logits.device))
    return tokens


def kind_of(params: "SamplingParams", vocab_size: int) -> Kind:
    """Return the function that samples rows with these parameters."""
    if params.temperature == 0:
        return greedy
    return race_likeliest if 0 < params.top_k < vocab_size else race_all


def greedy(logits: Tensor, params: RowParams) -> Tensor:
    """Return the likeliest token of each row. logits [num_rows, vocab_size] -> tokens [num_rows]"""
    return logits.argmax(dim=-1)


def row_params(rows: list[SamplingRow], device: torch.device) -> RowParams:
    """Return the parameters of all rows as tensors on `device`.

    >>> from nanovllm import SamplingParams
    >>> row_params([SamplingRow(SamplingParams(top_p=0.5), 0, 0, 0)], torch.device("cpu")).top_p
    tensor([[0.5000]])
    """

    def column(values: Iterable[float], dtype: torch.dtype) -> Tensor:
        return torch.tensor(list(values), dtype=dtype, device=device).unsqueeze(1)  # [num_rows, 1]

    return RowParams(
        temperature=column((max(row.params.temperature, 1e-5) for row in rows), torch.float32),
        top_k=column((min(row.params.top_k, 1 << 31) for row in rows), torch.int64),
        top_p=column((row.params.top_p if row.params.top_p < 1 else math.inf for row in rows), torch.float32),
        key=column((noise_key(row.seed, row.sample_index, row.position) for row in rows), torch.int64),
    )
