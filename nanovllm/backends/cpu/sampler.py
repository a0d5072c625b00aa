"""Greedy sampling in two passes over logits that stay in the CPU's caches, with the chosen tokens' log-probabilities.

The plain sampler first turns all logits into float32, then into log-probabilities, which takes several passes over
memory. A greedy row needs only its token, the largest logit, and log(sum(exp(logit - largest))).
"""

import math

import numpy as np
import torch
from numba import prange
from torch import Tensor

from ..torch.sampler import SampledToken, SamplingRow, no_probabilities, sample
from .vectors import (
    WIDTH,
    Memory,
    add,
    at,
    entry,
    exp,
    exp_of,
    floats,
    get,
    integers,
    kernel,
    lane_numbers,
    largest_of,
    largest_or_nan,
    like_of,
    load,
    maximum,
    maximum_or_nan,
    negative,
    parallel_entry,
    put,
    read,
    splat,
    stored,
    sum_of,
    where_below,
    write,
    zeros,
)

CHUNK = 8192  # logits of a row that one thread searches: they stay in the nearest caches


@parallel_entry
def find_peaks(logits: int, rows: int, size: int, like: np.ndarray, tokens: int, peaks: int, sums: int) -> None:
    """Find the largest logit of each chunk of each row, its token, and the sum of exp(logit - largest).

    NaN counts as the largest. Addresses: logits [rows, size] in the type of `like`; tokens int64 [rows, chunks]; peaks
    and sums float32 [rows, chunks].
    """
    each = -(-size // CHUNK)
    for chunk in prange(rows * each):
        start = chunk % each * CHUNK
        row = at(stored(logits, like), chunk // each * size)
        token, peak, total = peak_of(at(row, start), min(CHUNK, size - start))
        put(integers(tokens), chunk, start + token)
        write(floats(peaks), chunk, peak)
        write(floats(sums), chunk, total)


@kernel
def peak_of(logits: Memory, size: int) -> tuple[np.int64, np.float32, np.float32]:
    """Return where the first largest logit is, its value, and the sum of exp(logit - largest)."""
    peaks, i, whole = splat(read(logits, 0)), 0, size // WIDTH * WIDTH
    for i in range(0, whole, WIDTH):
        peaks = maximum_or_nan(peaks, load(logits, i))
    for i in range(whole, size):
        peaks = maximum_or_nan(peaks, splat(read(logits, i)))
    peak = largest_or_nan(peaks)
    minus, first, sums, total, nowhere = splat(-peak), splat(-size), zeros(), np.float32(0), splat(-size)
    for i in range(0, whole, WIDTH):
        numbers = load(logits, i)
        sums = add(sums, exp_of(add(numbers, minus)))
        first = maximum(first, where_below(numbers, splat(peak), nowhere, splat(-i)))
    token = -largest_of(add(first, negative(lane_numbers())))
    for i in range(whole, size):
        total += exp(read(logits, i) - peak)
        if token >= size and read(logits, i) == peak:
            token = np.float32(i)
    return np.int64(token), peak, total + sum_of(sums)


def sample_rows(logits: Tensor, rows: list[SamplingRow]) -> list[SampledToken]:
    """Sample one token for each row of `logits` [num_rows, vocab_size], as the plain sampler does.

    Raise FloatingPointError with the row's number if a row has no probabilities.
    """
    if not any(row.params.temperature == 0 for row in rows):
        return sample(logits, rows)
    tokens, logprobs = greedy_tokens(logits)
    for i, logprob in enumerate(logprobs):
        if not math.isfinite(logprob):
            raise FloatingPointError(no_probabilities(i))
    sampled = list(map(SampledToken, tokens, logprobs))
    drawn = [i for i, row in enumerate(rows) if row.params.temperature > 0]
    if drawn:
        for i, token in zip(drawn, sample(logits[drawn], [rows[i] for i in drawn]), strict=True):
            sampled[i] = token
    return sampled


def greedy_tokens(logits: Tensor) -> tuple[list[int], list[float]]:
    """Return each row's likeliest token and its log-probability.

    logits [num_rows, vocab_size]
    """
    logits, num_rows, size = logits.contiguous(), *logits.shape
    chunks = -(-size // CHUNK)
    numbers = torch.empty(num_rows * (chunks + 1), dtype=torch.int64)  # tokens of chunks, then of rows
    parts = torch.empty(num_rows * (2 * chunks + 1))  # peaks and sums of chunks, then logprobs of rows
    tokens, peaks, sums = numbers.data_ptr(), parts.data_ptr(), parts.data_ptr() + 4 * num_rows * chunks
    find_peaks(logits.data_ptr(), num_rows, size, like_of(logits.dtype), tokens, peaks, sums)
    chosen, logprobs = tokens + 8 * num_rows * chunks, sums + 4 * num_rows * chunks
    join_chunks(tokens, peaks, sums, num_rows, chunks, chosen, logprobs)
    return numbers[-num_rows:].tolist(), parts[-num_rows:].tolist()


@entry
def join_chunks(tokens: int, peaks: int, sums: int, rows: int, chunks: int, chosen: int, logprobs: int) -> None:
    """Find the first of the largest logits, and its log-probability, or NaN if the logit is not finite.

    Addresses: tokens int64 [rows, chunks]; peaks, sums float32 [rows, chunks]; chosen int64 [rows]; logprobs float32
    [rows].
    """
    for row in range(rows):
        best, total, has_nan = row * chunks, np.float32(0), False
        for chunk in range(row * chunks, (row + 1) * chunks):
            has_nan = has_nan or np.isnan(read(floats(peaks), chunk))
            if read(floats(peaks), chunk) > read(floats(peaks), best):
                best = chunk
        peak = read(floats(peaks), best)
        for chunk in range(row * chunks, (row + 1) * chunks):
            if read(floats(peaks), chunk) > -np.inf:  # a chunk of nothing but -inf has no sum
                total += read(floats(sums), chunk) * exp(read(floats(peaks), chunk) - peak)
        put(integers(chosen), row, get(integers(tokens), best))
        write(floats(logprobs), row, -np.log(total) if np.isfinite(peak) and not has_nan else np.float32(np.nan))
