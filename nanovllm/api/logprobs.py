"""Of rows of logits, the likeliest tokens and their log-probabilities."""

from typing import NamedTuple

import torch
from torch import Tensor

MAX_LOGITS = 1 << 24  # looked at together: a long chunk of a large vocabulary is cut


class Logprob(NamedTuple):
    logprob: float  # natural log, of the raw logits
    rank: int  # 1 is the likeliest
    decoded_token: str | None = None  # its text, if there is a tokenizer


def top_logprobs(logits: Tensor, token_ids: list[int], count: int) -> list[dict[int, Logprob]]:
    """For each row the `count` likeliest tokens, in this order, and then the row's token if it is not among them.

    logits [num_rows, vocab_size], token_ids one for each row

    >>> [row] = top_logprobs(torch.tensor([[0.0, 1.0, -1.0]]), [2], count=1)
    >>> {token: entry.rank for token, entry in row.items()}
    {1: 1, 2: 3}
    """
    assert logits.dim() == 2 and logits.shape[0] == len(token_ids), (logits.shape, len(token_ids))
    logprobs = logits.float().log_softmax(dim=-1)  # [num_rows, vocab_size]
    tokens = torch.tensor(token_ids, device=logits.device).unsqueeze(1)  # [num_rows, 1]
    own = logprobs.gather(1, tokens)  # [num_rows, 1]
    ranks = 1 + (logprobs > own).sum(dim=-1)  # [num_rows]
    top = logprobs.topk(min(count, logits.shape[1]), dim=-1)  # [num_rows, count]
    columns = (token_ids, own.squeeze(1).tolist(), ranks.tolist(), top.indices.tolist(), top.values.tolist())
    rows = []
    for token_id, logprob, rank, likely, values in zip(*columns, strict=True):
        row = {each: Logprob(value, place) for place, (each, value) in enumerate(zip(likely, values, strict=True), 1)}
        row.setdefault(token_id, Logprob(logprob, rank))
        rows.append(row)
    return rows
