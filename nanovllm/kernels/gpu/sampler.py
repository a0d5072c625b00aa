"""Sampling on the device. What is to be known of a step comes to the host in one copy: each waits for the device."""

import torch
from torch import Tensor

from ...core.sampling import SampledToken, SamplingRow, choose


def sample_rows(logits: Tensor, rows: list[SamplingRow]) -> list[SampledToken]:
    """As sample() of core: one token for each row, the same ones. logits [num_rows, vocab_size]

    Raises FloatingPointError, naming the row, if a row has no probabilities.
    """
    if not rows:
        return []
    numbers = logits.float()
    if all(row.params.temperature == 0 for row in rows):
        tokens = numbers.argmax(dim=-1)  # [num_rows]
    else:
        tokens = choose(numbers, rows)  # [num_rows]
    chosen = numbers.gather(1, tokens.unsqueeze(1)).squeeze(1) - numbers.logsumexp(dim=-1)  # [num_rows]
    told = torch.stack((tokens.double(), chosen.double())).tolist()  # the copy; float64 holds every token id
    sampled = [SampledToken(int(token), logprob) for token, logprob in zip(*told, strict=True)]
    for i, (_, logprob) in enumerate(sampled):
        if not -float("inf") < logprob < float("inf"):
            at_fault = f"the logits of row {i} are NaN, infinite or all -inf"
            raise FloatingPointError(f"{at_fault}: no token can be sampled")
    return sampled
