"""The sampler, which chooses a token for each row of logits, and computes log-probabilities.

Unless a row is greedy, its token is sampled by an exponential race: the token with the largest p / Exp(1) wins, so each
token wins with its probability p. Unlike inverting the cumulative distribution, a race is robust: noise of 1e-5 in the
logits almost never changes the winner. A race also needs no sort, which takes longer than everything else together
when the vocabulary has 128,256 tokens.
"""

import hashlib
import math
from collections.abc import Callable, Iterable
from itertools import count
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from ...requests.sampling_params import SamplingParams
from ...requests.tokens import Logprob, SamplingRow, StepOutput

MAX_IN_CACHE = 1 << 20  # logits processed at a time on a CPU, so that intermediate results stay in its cache
CHUNK = 128  # tokens per chunk: the chunks race first, then the tokens of the winning chunk
SEGMENT = 32  # tokens per segment: the search for the likeliest tokens first compares the segments' maxima


class RowParams(NamedTuple):
    """The sampling parameters of each row. All tensors are [num_rows, 1]."""

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor  # inf: no limit, even if rounding pushes a sum of probabilities past 1
    min_p_gap: Tensor  # lowest allowed logit minus the largest one, at most 0; -inf: no limit
    key: Tensor  # int64, determines the row's noise


Method = Callable[[Tensor, RowParams], Tensor]  # logits [num_rows, vocab_size] -> tokens [num_rows]


def sample(logits: Tensor, rows: list[SamplingRow]) -> StepOutput:
    """Sample one token for each row of `logits` [num_rows, vocab_size].

    Raise FloatingPointError with the row's number if its logits contain NaN or +inf, or are all -inf.
    """
    assert logits.dim() == 2 and logits.shape[0] == len(rows), (logits.shape, len(rows))
    if logits.device.type == "mps":  # MPS has no float64, which the noise needs
        logits = logits.cpu()
    sampled = StepOutput([], [])
    size = max(1, MAX_IN_CACHE // logits.shape[1] if logits.device.type == "cpu" else len(rows))
    for start in range(0, len(rows), size):
        part = logits[start : start + size].float()
        logprobs = part.log_softmax(dim=-1)  # [size, vocab_size]
        for i, is_nan in enumerate(logprobs[:, 0].isnan().tolist()):  # one NaN in a row makes the whole row NaN
            if is_nan:
                raise FloatingPointError(invalid_logits_message(start + i))
        tokens = choose(part, rows[start : start + size])  # [size]
        chosen = logprobs.gather(1, tokens.unsqueeze(1)).squeeze(1)
        sampled.token_ids.extend(tokens.tolist())
        sampled.logprobs.extend(chosen.tolist())
    return sampled


def invalid_logits_message(row: int) -> str:
    """Return the message of the FloatingPointError for a row without valid probabilities."""
    return f"the logits of row {row} are NaN, infinite or all -inf: no token can be sampled"


def choose(logits: Tensor, rows: list[SamplingRow]) -> Tensor:
    """Choose a token for each row, with one call per sampling method.

    logits float32 [num_rows, vocab_size] -> tokens int64 [num_rows]
    """
    rows_by_method: dict[Method, list[int]] = {}
    for i, row in enumerate(rows):
        rows_by_method.setdefault(method_for(row.params, logits.shape[1]), []).append(i)
    tokens = torch.empty(len(rows), dtype=torch.int64, device=logits.device)
    for method, indices in rows_by_method.items():
        selected = logits if len(indices) == len(rows) else logits[indices]
        params = row_params([rows[i] for i in indices], logits.device)
        tokens[indices] = method(ban_improbable(selected, params), params)
    return tokens


def method_for(params: SamplingParams, vocab_size: int) -> Method:
    """Return the function that samples rows with these parameters."""
    if params.temperature == 0:
        return greedy
    return sample_from_top_k if 0 < params.top_k < vocab_size else sample_from_all


def greedy(logits: Tensor, params: RowParams) -> Tensor:
    """Return the likeliest token of each row of `logits` [num_rows, vocab_size], as int64 [num_rows]."""
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
        temperature=column((t and max(t, 1e-5) for t in (row.params.temperature for row in rows)), torch.float32),
        top_k=column((min(row.params.top_k, 1 << 31) for row in rows), torch.int64),
        top_p=column((row.params.top_p if row.params.top_p < 1 else math.inf for row in rows), torch.float32),
        min_p_gap=column((min_p_gap(row.params) for row in rows), torch.float32),
        key=column((noise_key(row.seed, row.sample_index, row.position) for row in rows), torch.int64),
    )


def min_p_gap(params: SamplingParams) -> float:
    """Return temperature * log(min_p), because p / p_max is exp((logit - logit_max) / temperature).

    >>> from nanovllm import SamplingParams
    >>> min_p_gap(SamplingParams(min_p=1)), min_p_gap(SamplingParams(min_p=0))
    (0.0, -inf)
    """
    return params.temperature * math.log(params.min_p) if params.min_p else -math.inf


def ban_improbable(logits: Tensor, params: RowParams) -> Tensor:
    """Return the logits, with -inf for tokens whose probability is below min_p times the largest (arXiv:2407.01082).

    logits, out float32 [num_rows, vocab_size]
    """
    if not params.min_p_gap.isfinite().any():
        return logits
    return logits.masked_fill(logits < logits.amax(dim=-1, keepdim=True) + params.min_p_gap, -math.inf)


# The race


def sample_from_all(logits: Tensor, params: RowParams) -> Tensor:
    """Sample each row from all tokens, or from the smallest set of tokens whose probabilities sum to top_p.

    A row that draws a token outside this set draws again, from likelier tokens only. With top_p 0.9, that is about one
    row in ten. logits float32 [num_rows, vocab_size] -> tokens int64 [num_rows]
    """
    probs = probs_in_chunks(logits, params)  # [num_rows, num_chunks, CHUNK]
    tokens = draw(probs, params.key, attempt=0)
    rows = torch.arange(len(logits), device=logits.device)  # rows whose token may be outside top_p
    for attempt in count(1):
        if not params.top_p[rows].isfinite().any():
            return tokens
        probs = keep_likelier(probs, tokens[rows])
        likelier = probs.sum(dim=(1, 2))  # [len(rows)], total probability of all likelier tokens
        redrawn = ((likelier >= params.top_p[rows, 0]) & (likelier > 0)).nonzero().squeeze(1)
        rows, probs = rows[redrawn], probs[redrawn]
        tokens[rows] = draw(probs, params.key[rows], attempt)
    raise AssertionError("count() never ends")


def probs_in_chunks(logits: Tensor, params: RowParams) -> Tensor:
    """Return the probabilities of `logits` [num_rows, vocab_size] in chunks: [num_rows, num_chunks, CHUNK]."""
    probs = (logits / params.temperature).softmax(dim=-1)
    if logits.shape[1] % CHUNK:
        probs = pad(probs, (0, -logits.shape[1] % CHUNK))
    return probs.view(len(logits), -1, CHUNK)


def draw(probs: Tensor, keys: Tensor, attempt: int) -> Tensor:
    """Draw a token for each row: race the chunks by their total probabilities, then the tokens of the winning chunk.

    The result has the same distribution as a race of all tokens, but needs far less noise.
    probs float32 [num_rows, num_chunks, CHUNK]; keys [num_rows, 1] -> tokens [num_rows]
    """
    num_rows, num_chunks, _ = probs.shape
    racers = num_chunks + CHUNK
    noise = exponential_noise(keys, attempt * racers + torch.arange(racers, device=probs.device))  # [num_rows, racers]
    chunks = (probs.sum(dim=-1) / noise[:, :num_chunks]).argmax(dim=-1)  # [num_rows]
    within = probs[torch.arange(num_rows, device=probs.device), chunks] / noise[:, num_chunks:]  # [num_rows, CHUNK]
    return chunks * CHUNK + within.argmax(dim=-1)


def keep_likelier(probs: Tensor, tokens: Tensor) -> Tensor:
    """Return `probs` with zeros for each row's token and all less likely tokens.

    Of equally likely tokens, the one with the lower id counts as likelier.
    probs, out [num_rows, num_chunks, CHUNK]; tokens [num_rows]
    """
    rows, chunks, places = torch.arange(len(probs), device=probs.device), tokens // CHUNK, tokens % CHUNK
    token_probs = probs[rows, chunks, places].unsqueeze(1)  # [num_rows, 1]
    is_ahead = torch.arange(probs.shape[1], device=probs.device) < chunks.unsqueeze(1)  # [num_rows, num_chunks]
    # keep equally likely tokens in earlier chunks, too: they have lower ids
    bounds = torch.where(is_ahead, token_probs.nextafter(torch.zeros_like(token_probs)), token_probs)
    kept = torch.gt(probs, bounds.unsqueeze(2), out=torch.empty_like(probs)).mul_(probs)  # 1.0 or 0.0, times probs
    chunk_probs = probs[rows, chunks]  # [num_rows, CHUNK]
    is_ahead = torch.arange(CHUNK, device=probs.device) < places.unsqueeze(1)
    kept[rows, chunks] += chunk_probs * ((chunk_probs == token_probs) & is_ahead)
    return kept


def sample_from_top_k(logits: Tensor, params: RowParams) -> Tensor:
    """Sample each row from its top_k likeliest tokens, or from the smallest set of them that sums to top_p.

    logits float32 [num_rows, vocab_size] -> tokens int64 [num_rows]
    """
    return sample_among(likeliest(logits, int(params.top_k.max())), logits, params)


def sample_among(tokens: Tensor, logits: Tensor, params: RowParams) -> Tensor:
    """Sample like sample_from_top_k(), given at least the top_k likeliest tokens of each row, likeliest first.

    tokens int64 [num_rows, k]; logits float32 [num_rows, vocab_size] -> int64 [num_rows]
    """
    rank = torch.arange(tokens.shape[1], device=logits.device)  # [k]
    ordered = (logits.gather(1, tokens) / params.temperature).masked_fill(rank >= params.top_k, -math.inf)
    probs = ordered.softmax(dim=-1)  # [num_rows, k]
    likelier = probs.cumsum(dim=-1) - probs  # total probability of all likelier tokens
    probs = probs.masked_fill((likelier >= params.top_p) & (rank > 0), 0)
    winners = (probs / exponential_noise(params.key, tokens)).argmax(dim=-1, keepdim=True)  # [num_rows, 1]
    return tokens.gather(1, winners).squeeze(1)


def likeliest(logits: Tensor, k: int) -> Tensor:
    """Return the k likeliest tokens of each row, likeliest first, lower ids first among equals: int64 [num_rows, k].

    All of them are in the k segments with the largest maxima, so only these segments are searched.
    logits float32 [num_rows, vocab_size]
    """
    if logits.shape[1] % SEGMENT:
        logits = pad(logits, (0, -logits.shape[1] % SEGMENT), value=-math.inf)
    maxima = logits.view(len(logits), -1, SEGMENT).amax(dim=-1)  # [num_rows, num_segments]
    segments = ids_of_largest(maxima, torch.arange(maxima.shape[1], device=logits.device), k)  # [num_rows, at most k]
    places = torch.arange(SEGMENT, device=logits.device)
    tokens = (segments.unsqueeze(2) * SEGMENT + places).flatten(1)  # [num_rows, at most k * SEGMENT]
    return ids_of_largest(logits.gather(1, tokens), tokens, k)


def ids_of_largest(values: Tensor, ids: Tensor, k: int) -> Tensor:
    """Return the ids of the k largest values of each row, the smallest ids first among equals.

    Each value and its id are packed into one integer that sorts like the pair: (bits of the value << 32) - id.
    values float32, ids int64 [num_rows, n]
    """
    bits = (values + 0.0).view(torch.int32)  # -0.0 becomes 0.0
    bits = (bits ^ (bits >> 31 & 0x7FFFFFFF)).long()  # the bits of negative floats sort backwards
    packed = (bits << 32) - ids
    return -packed.topk(min(k, packed.shape[1]), dim=-1).values & 0xFFFFFFFF


# Noise


def noise_key(seed: int, sample_index: int, position: int) -> int:
    """Return the 64-bit key of a row's noise. It does not depend on other rows or earlier steps."""
    text = f"{seed},{sample_index},{position}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), signed=True)


def exponential_noise(keys: Tensor, places: Tensor) -> Tensor:
    """Return Exp(1) noise, float32 [num_rows, n]. A number depends only on its key and place, on any device.

    The random numbers are splitmix64's (Steele, Lea and Flood, 2014).
    keys int64 [num_rows, 1]; places int64 [n] or [num_rows, n]
    """
    z = keys + (places + 1) * (0x9E3779B97F4A7C15 - 2**64)
    z = (z ^ (z >> 30 & (1 << 34) - 1)) * (0xBF58476D1CE4E5B9 - 2**64)  # & makes >> shift in zeros
    z = (z ^ (z >> 27 & (1 << 37) - 1)) * (0x94D049BB133111EB - 2**64)
    z = z ^ (z >> 31 & (1 << 33) - 1)
    uniform = ((z >> 12 & (1 << 52) - 1).double() + 0.5) * 2.0**-52  # exact, above 0 and below 1
    return -torch.log1p(-uniform).float()


# Log-probabilities


def top_logprobs(logits: Tensor, token_ids: list[int], num_logprobs: int) -> list[dict[int, Logprob]]:
    """Return the `num_logprobs` likeliest tokens of each row in order, then the row's token if it is not among them.

    logits [num_rows, vocab_size]; `token_ids` holds the token of each row.

    >>> [row] = top_logprobs(torch.tensor([[0.0, 1.0, -1.0]]), [2], num_logprobs=1)
    >>> {token: entry.rank for token, entry in row.items()}
    {1: 1, 2: 3}
    """
    assert logits.dim() == 2 and logits.shape[0] == len(token_ids), (logits.shape, len(token_ids))
    result: list[dict[int, Logprob]] = []
    size = max(1, MAX_IN_CACHE // logits.shape[1])
    for start in range(0, len(token_ids), size):
        part, part_ids = logits[start : start + size].float(), token_ids[start : start + size]
        logprobs = part.log_softmax(dim=-1)  # [size, vocab_size]
        token_logprobs = logprobs.gather(1, torch.tensor(part_ids, device=logits.device).unsqueeze(1))  # [size, 1]
        ranks = 1 + (logprobs > token_logprobs).sum(dim=-1)  # [size]
        top = likeliest(part, min(num_logprobs, logits.shape[1]))  # [size, num_logprobs]
        columns = [column.tolist() for column in (token_logprobs.squeeze(1), ranks, top, logprobs.gather(1, top))]
        for token_id, logprob, rank, tokens, values in zip(part_ids, *columns, strict=True):
            row = {token: Logprob(value, i) for i, (token, value) in enumerate(zip(tokens, values, strict=True), 1)}
            row.setdefault(token_id, Logprob(logprob, rank))
            result.append(row)
    return result


def named_logprobs(logits: Tensor, token_ids: list[int]) -> dict[int, Logprob]:
    """Return the log-probabilities and ranks of these tokens, in the same order. `logits` [vocab_size] is one row."""
    logprobs = logits.float().log_softmax(dim=-1)  # [vocab_size]
    token_logprobs = logprobs[token_ids]  # [num_tokens]
    values, order = token_logprobs.sort()
    counts = torch.bucketize(logprobs, values).bincount(minlength=len(values) + 1)  # [num_tokens + 1], per interval
    ranks = 1 + counts.flip(0).cumsum(0).flip(0)[1:][order.argsort()]  # [num_tokens]
    return dict(zip(token_ids, map(Logprob, token_logprobs.tolist(), ranks.tolist()), strict=True))
