"""Log-probabilities of the likeliest tokens of a row of logits, and of given tokens."""

from typing import NamedTuple

import torch
from torch import Tensor

from .race import likeliest

MAX_IN_CACHE = 1 << 20  # logits that are handled together: intermediate results of so many stay in the CPU's cache


class Logprob(NamedTuple):
    logprob: float  # natural log, of the raw logits
    rank: int  # 1 is the likeliest
    decoded_token: str | None = None  # its text, if there is a tokenizer


def top_logprobs(logits: Tensor, token_ids: list[int], count: int) -> list[dict[int, Logprob]]:
    """Return the `count` likeliest tokens of each row, in order, and then the row's own token if it is not among them.

    logits [num_rows, vocab_size]; token_ids has one for each row

    >>> [row] = top_logprobs(torch.tensor([[0.0, 1.0, -1.0]]), [2], count=1)
    >>> {token: entry.rank for token, entry in row.items()}
    {1: 1, 2: 3}
    """
    assert logits.dim() == 2 and logits.shape[0] == len(token_ids), (logits.shape, len(token_ids))
    size = max(1, MAX_IN_CACHE // logits.shape[1])
    parts = (slice(start, start + size) for start in range(0, len(token_ids), size))
    return [row for part in parts for row in _top_logprobs(logits[part].float(), token_ids[part], count)]


def _top_logprobs(logits: Tensor, token_ids: list[int], count: int) -> list[dict[int, Logprob]]:
    """Do the same for a few rows. logits float32 [num_rows, vocab_size]"""
    logprobs = logits.log_softmax(dim=-1)  # [num_rows, vocab_size]
    own = logprobs.gather(1, torch.tensor(token_ids, device=logits.device).unsqueeze(1))  # [num_rows, 1]
    ranks = 1 + (logprobs > own).sum(dim=-1)  # [num_rows]
    top = likeliest(logits, min(count, logits.shape[1]))  # [num_rows, count]
    columns = [column.tolist() for column in (own.squeeze(1), ranks, top, logprobs.gather(1, top))]
    rows = []
    for token_id, logprob, rank, likely, values in zip(token_ids, *columns, strict=True):
        row = {each: Logprob(value, place) for place, (each, value) in enumerate(zip(likely, values, strict=True), 1)}
        row.setdefault(token_id, Logprob(logprob, rank))
        rows.append(row)
    return rows


def named_logprobs(logits: Tensor, token_ids: list[int]) -> dict[int, Logprob]:
    """Return the log-probabilities of these tokens, each once, in this order. logits [vocab_size]"""
    logprobs = logits.float().log_softmax(dim=-1)  # [vocab_size]
    own = logprobs[token_ids]  # [num_tokens]
    ranks = 1 + (logprobs > own.unsqueeze(1)).sum(dim=-1)  # [num_tokens]
    return dict(zip(token_ids, map(Logprob, own.tolist(), ranks.tolist()), strict=True))
