"""Sampling on the device. The host waits once a step, for the result, which is one copy.

The plain sampler looks at numbers of the device on its way: which rows must draw again (top_p), how many candidates
there are (top_k). Each look waits until the device is idle, and then the device waits for the host. Here the host
relies on what it knows itself, the parameters of the rows. With top_p each row draws again on the device, whether it
must or not, as often as is nearly always enough. Where that is not enough, the plain sampler chooses the token.
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
from .fields import fields_of, room_for

if TYPE_CHECKING:
    from ...engine.sampling_params import SamplingParams

REDRAWS = 3  # with top_p 0.9 one row in ten must draw again, and at most one in ten thousand more often than this
GREEDY, LIKELIEST, ALL, ALL_WITH_TOP_P = range(4)  # kinds of rows
DTYPES = {"order": torch.int64, "top_k": torch.int64, "key": torch.int64} | {
    "temperature": torch.float32,
    "top_p": torch.float32,
}


def sample_rows(
    logits: Tensor, likeliest: Tensor, rows: list[SamplingRow], meanwhile: Callable[[], None] = lambda: None
) -> list[SampledToken]:
    """Sample the same tokens as the plain sampler. `meanwhile` is called while the device computes.

    logits [num_rows, vocab_size]; likeliest float32 [num_rows, 3], by find_likeliest() from the logits.
    Raise FloatingPointError, naming the row, if a row has no probabilities.
    """
    chosen = likeliest
    if any(row.params.temperature > 0 for row in rows):
        chosen = draw_tokens(logits, likeliest, rows)
    copy = chosen.to("cpu", non_blocking=True)  # into pinned memory
    meanwhile()
    if chosen.is_cuda:
        torch.cuda.current_stream(chosen.device).synchronize()
    sampled = []
    for i, (row, (token, logprob, is_open)) in enumerate(zip(rows, copy.tolist(), strict=True)):
        if not math.isfinite(logprob):
            raise FloatingPointError(no_probabilities(i))
        if row.params.temperature > 0 and is_open:
            sampled += sample(logits[i : i + 1], [row])
        else:
            sampled.append(SampledToken(int(token), logprob))
    return sampled


def draw_tokens(logits: Tensor, greedy: Tensor, rows: list[SamplingRow]) -> Tensor:
    """Return for each row a token, its log-probability, and whether the row is open: it has to draw again.

    Greedy rows stay as they are, but for the third number.
    logits [num_rows, vocab_size]; greedy, by find_likeliest(), and out float32 [num_rows, 3]
    """
    kinds = [kind_of(row.params, logits.shape[1]) for row in rows]
    order = sorted((i for i, kind in enumerate(kinds) if kind != GREEDY), key=kinds.__getitem__)
    sampled = [rows[i] for i in order]
    places, params = to_device(order, sampled, logits.device)
    numbers = (logits if order == list(range(len(rows))) else logits.index_select(0, places)).float()
    parts, start = [], 0
    for kind, group in groupby(order, key=kinds.__getitem__):
        end = start + len(list(group))
        own = RowParams(*(column[start:end] for column in params))
        parts.append(race(kind, numbers[start:end], own, max(row.params.top_k for row in sampled[start:end])))
        start = end
    tokens, are_open = (torch.cat(each) for each in zip(*parts, strict=True))  # [len(order)] each
    lses = greedy[:, 2].index_select(0, places)
    logprobs = numbers.gather(1, tokens.unsqueeze(1)).squeeze(1) - lses  # [len(order)]
    return greedy.index_copy(0, places, torch.stack((tokens.float(), logprobs, are_open.float()), dim=1))


def kind_of(params: "SamplingParams", vocab_size: int) -> int:
    """Return how rows with these parameters are sampled.

    >>> from nanovllm import SamplingParams
    >>> kind_of(SamplingParams(temperature=0), 100), kind_of(SamplingParams(top_k=5, top_p=0.5), 100)
    (0, 1)
    >>> kind_of(SamplingParams(top_k=100), 100), kind_of(SamplingParams(top_p=0.5), 100)
    (2, 3)
    """
    if params.temperature == 0:
        return GREEDY
    if 0 < params.top_k < vocab_size:
        return LIKELIEST
    return ALL if params.top_p == 1 else ALL_WITH_TOP_P


def to_device(order: list[int], rows: list[SamplingRow], device: torch.device) -> tuple[Tensor, RowParams]:
    """Return `order` as int64 [len(rows)], and the rows' parameters, in one copy that nobody waits for."""
    host = room_for(DTYPES, len(rows), torch.device("cpu"), is_pinned=device.type == "cuda")
    fields = fields_of(host, DTYPES)
    fields["order"].copy_(torch.tensor(order))
    for name, column in row_params(rows, torch.device("cpu"))._asdict().items():
        fields[name].copy_(column.squeeze(1))
    copied = fields_of(host.to(device, non_blocking=True), DTYPES)
    return copied["order"], RowParams(**{name: copied[name].unsqueeze(1) for name in RowParams._fields})


def race(kind: int, numbers: Tensor, params: RowParams, top_k: int) -> tuple[Tensor, Tensor]:
    """Sample rows of one kind, `top_k` the largest of theirs. Return the tokens, and which rows are open: [num_rows].

    numbers float32 [num_rows, vocab_size]
    """
    if kind == LIKELIEST:
        tokens = race_among(likeliest(numbers, top_k), numbers, params)
    elif kind == ALL_WITH_TOP_P:
        return race_again(probs_in_chunks(numbers, params), params)
    else:
        tokens = draw(probs_in_chunks(numbers, params), params.key, attempt=0)
    return tokens, torch.zeros_like(tokens, dtype=torch.bool)


def race_again(probs: Tensor, params: RowParams) -> tuple[Tensor, Tensor]:
    """Do what race_all() does without a look at which rows must draw again. Return that for each row at the end.

    probs float32 [num_rows, num_chunks, CHUNK] -> tokens [num_rows], bool [num_rows]
    """
    tokens = draw(probs, params.key, attempt=0)
    for attempt in count(1):
        probs = keep_likelier(probs, tokens)
        before = probs.sum(dim=(1, 2))  # [num_rows]
        are_open = (before >= params.top_p[:, 0]) & (before > 0)
        if attempt > REDRAWS:
            return tokens, are_open
        tokens = torch.where(are_open, draw(probs, params.key, attempt), tokens)
    raise AssertionError
