"""Sampling on the device. The host waits once per step, for a single copy of the results.

The plain sampler reads numbers from the device along the way: which rows must draw again (top_p), how many candidates
they have (top_k). Each read waits until the device is idle, and then the device waits for the host. Here the host
relies on what it knows by itself, the parameters of the rows. With top_p, every row draws REDRAWS more times on the
device, needed or not. That is almost always enough; for the rest, the plain sampler chooses the token.
"""

import math
from collections.abc import Callable
from itertools import count, groupby
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..torch.sampler import (
    RowParams,
    SampledToken,
    SamplingRow,
    draw,
    keep_likelier,
    likeliest,
    no_probabilities,
    probs_in_chunks,
    race_among,
    row_params,
    sample,
)
from .inputs import allocate_fields, field_views

if TYPE_CHECKING:
    from ...engine.sampling_params import SamplingParams

REDRAWS = 3  # at top_p 0.9, one row in ten must draw again, and at most one in ten thousand more often than this
GREEDY, TOP_K, FULL, TOP_P = range(4)  # how a row is sampled; TOP_K may apply top_p as well
FIELDS = {
    "order": torch.int64,
    "top_k": torch.int64,
    "key": torch.int64,
    "temperature": torch.float32,
    "top_p": torch.float32,
}


def sample_rows(
    logits: Tensor, greedy: Tensor, rows: list[SamplingRow], meanwhile: Callable[[], None] = lambda: None
) -> list[SampledToken]:
    """Return the tokens that the plain sampler would. `meanwhile` is called while the device computes.

    Raise FloatingPointError, naming the row, if a row has no probabilities.

    logits [num_rows, vocab_size]; greedy float32 [num_rows, 3], from find_likeliest()
    """
    sampling = Sampling(logits, greedy, rows)
    meanwhile()
    return sampling.read()


class Sampling:
    """Tokens that the device is sampling, as sample_rows() does."""

    def __init__(self, logits: Tensor, greedy: Tensor, rows: list[SamplingRow]) -> None:
        self._logits, self._rows = logits, rows
        is_greedy = not any(row.params.temperature > 0 for row in rows)
        self.results = greedy if is_greedy else draw_tokens(logits, greedy, rows)  # float32 [num_rows, 3]
        self._copy = self.results.to("cpu", non_blocking=True, copy=True)  # into pinned memory
        self._copied = torch.cuda.current_stream(logits.device).record_event() if logits.is_cuda else None

    def read(self) -> list[SampledToken]:
        """Wait for the copy, but not for later steps, and return the tokens."""
        if self._copied is not None:
            self._copied.synchronize()
        sampled = []
        for i, (row, (token, logprob, must_redraw)) in enumerate(zip(self._rows, self._copy.tolist(), strict=True)):
            if not math.isfinite(logprob):
                raise FloatingPointError(no_probabilities(i))
            if row.params.temperature > 0 and must_redraw:
                sampled += sample(self._logits[i : i + 1], [row])
            else:
                sampled.append(SampledToken(int(token), logprob))
        return sampled


def may_redraw(rows: list[SamplingRow], vocab_size: int) -> bool:
    """Return True if the host may have to draw again for a row, so that the logits must stay until it has read them."""
    return any(method_for(row.params, vocab_size) == TOP_P for row in rows)


def draw_tokens(logits: Tensor, greedy: Tensor, rows: list[SamplingRow]) -> Tensor:
    """Return each row's token, its log-probability, and whether the row must draw again: float32 [num_rows, 3].

    Greedy rows come from `greedy`, and the third number means nothing for them.

    logits [num_rows, vocab_size]; greedy float32 [num_rows, 3]
    """
    methods = [method_for(row.params, logits.shape[1]) for row in rows]
    order = sorted((i for i, method in enumerate(methods) if method != GREEDY), key=methods.__getitem__)
    drawn = [rows[i] for i in order]
    places, params = to_device(order, drawn, logits.device)
    numbers = (logits if order == list(range(len(rows))) else logits.index_select(0, places)).float()
    parts, start = [], 0
    for method, group in groupby(order, key=methods.__getitem__):
        end = start + len(list(group))
        own = RowParams(*(column[start:end] for column in params))
        parts.append(race(method, numbers[start:end], own, max(row.params.top_k for row in drawn[start:end])))
        start = end
    tokens, must_redraw = (torch.cat(each) for each in zip(*parts, strict=True))  # [len(order)] each
    lses = greedy[:, 2].index_select(0, places)
    logprobs = numbers.gather(1, tokens.unsqueeze(1)).squeeze(1) - lses  # [len(order)]
    return greedy.index_copy(0, places, torch.stack((tokens.float(), logprobs, must_redraw.float()), dim=1))


def method_for(params: "SamplingParams", vocab_size: int) -> int:
    """Return how to sample rows with these parameters.

    >>> from nanovllm import SamplingParams
    >>> method_for(SamplingParams(temperature=0), 100), method_for(SamplingParams(top_k=5, top_p=0.5), 100)
    (0, 1)
    >>> method_for(SamplingParams(top_k=100), 100), method_for(SamplingParams(top_p=0.5), 100)
    (2, 3)
    """
    if params.temperature == 0:
        return GREEDY
    if 0 < params.top_k < vocab_size:
        return TOP_K
    return FULL if params.top_p == 1 else TOP_P


def to_device(order: list[int], rows: list[SamplingRow], device: torch.device) -> tuple[Tensor, RowParams]:
    """Copy `order` and the rows' parameters to the device, in one asynchronous copy. `order` becomes int64."""
    host = allocate_fields(FIELDS, len(rows), torch.device("cpu"), is_pinned=device.type == "cuda")
    fields = field_views(host, FIELDS)
    fields["order"].copy_(torch.tensor(order))
    for name, column in row_params(rows, torch.device("cpu"))._asdict().items():
        fields[name].copy_(column.squeeze(1))
    copied = field_views(host.to(device, non_blocking=True), FIELDS)
    return copied["order"], RowParams(**{name: copied[name].unsqueeze(1) for name in RowParams._fields})


def race(method: int, numbers: Tensor, params: RowParams, top_k: int) -> tuple[Tensor, Tensor]:
    """Sample rows that share a method. Return their tokens, and which rows must draw again, both [num_rows].

    `top_k` is the rows' largest. numbers float32 [num_rows, vocab_size], the logits
    """
    if method == TOP_K:
        tokens = race_among(likeliest(numbers, top_k), numbers, params)
    elif method == TOP_P:
        return race_top_p(probs_in_chunks(numbers, params), params)
    else:
        tokens = draw(probs_in_chunks(numbers, params), params.key, attempt=0)
    return tokens, torch.zeros_like(tokens, dtype=torch.bool)


def race_top_p(probs: Tensor, params: RowParams) -> tuple[Tensor, Tensor]:
    """Sample like the plain race_all(), without asking the device which rows must draw again.

    Return the tokens and which rows must still draw again, both [num_rows].

    probs float32 [num_rows, num_chunks, CHUNK]
    """
    tokens = draw(probs, params.key, attempt=0)
    for attempt in count(1):
        probs = keep_likelier(probs, tokens)
        likelier = probs.sum(dim=(1, 2))  # [num_rows], the probability of all likelier tokens
        must_redraw = (likelier >= params.top_p[:, 0]) & (likelier > 0)
        if attempt > REDRAWS:
            break
        tokens = torch.where(must_redraw, draw(probs, params.key, attempt), tokens)
    return tokens, must_redraw
