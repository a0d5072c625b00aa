"""The likeliest token of each row, and the logarithm of the sum of exponentials: two walks over a piece in the cache.

The plain sampler first turns all logits into float32 and into log-probabilities, several walks over memory. A greedy
row needs two numbers beside its token: the peak, and log(sum(exp(logit - peak))).
"""

import math

import numpy as np
import torch
from numba import njit, prange
from torch import Tensor

from ..torch.sampler import SampledToken, SamplingRow, no_probabilities, sample
from .exp import exp
from .lanes import exp_of, lane_numbers, largest_or_nan, maximum_or_nan, negative, where_below
from .plan import like_of
from .vectors import (
    ENTRY,
    OPTIONS,
    WIDTH,
    Memory,
    add,
    at,
    floats,
    get,
    integers,
    largest_of,
    load,
    maximum,
    put,
    read,
    splat,
    stored,
    sum_of,
    write,
    zeros,
)

PIECE = 8192  # logits: they stay in the nearest caches


@njit(parallel=True, **ENTRY)
def find_peaks(logits: int, rows: int, size: int, like: np.ndarray, tokens: int, peaks: int, sums: int) -> None:
    """Find the peak of each piece of each row, where it is, and the sum of exp(logit - peak). NaN is a peak.

    Addresses: logits [rows, size]; tokens int64, peaks, sums float32 [rows, pieces]; like: an array of the logits' type
    """
    each = -(-size // PIECE)
    for piece in prange(rows * each):
        start = piece % each * PIECE
        row = at(stored(logits, like), piece // each * size)
        token, peak, total = peak_of(at(row, start), min(PIECE, size - start))
        put(integers(tokens), piece, start + token)
        write(floats(peaks), piece, peak)
        write(floats(sums), piece, total)


@njit(**OPTIONS)
def peak_of(logits: Memory, size: int) -> tuple[int, float, float]:
    """Return where the largest is (the first of equals), what it is, and the sum of exp(logit - largest)."""
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
    """Sample one token for each row, as the plain sampler does. logits [num_rows, vocab_size], on the CPU

    Raise FloatingPointError, naming the row, if a row has no probabilities.
    """
    if not rows or not any(row.params.temperature == 0 for row in rows):
        return sample(logits, rows)
    tokens, logprobs, are_sound = likeliest(logits)
    for i, is_sound in enumerate(are_sound):
        if not is_sound:
            raise FloatingPointError(no_probabilities(i))
    sampled = list(map(SampledToken, tokens, logprobs))
    others = [i for i, row in enumerate(rows) if row.params.temperature > 0]
    if others:
        for i, token in zip(others, sample(logits[others], [rows[i] for i in others]), strict=True):
            sampled[i] = token
    return sampled


def likeliest(logits: Tensor) -> tuple[list[int], list[float], list[bool]]:
    """Return for each row its likeliest token, the log-probability of that, and whether it is finite.

    logits [num_rows, vocab_size]
    """
    logits, num_rows, size = logits.contiguous(), *logits.shape
    pieces = -(-size // PIECE)
    numbers = torch.empty(num_rows * (pieces + 1), dtype=torch.int64)  # tokens of pieces, then of rows
    parts = torch.empty(num_rows * (2 * pieces + 1))  # peaks and sums of pieces, then logprobs of rows
    tokens, peaks, sums = numbers.data_ptr(), parts.data_ptr(), parts.data_ptr() + 4 * num_rows * pieces
    find_peaks(logits.data_ptr(), num_rows, size, like_of(logits.dtype), tokens, peaks, sums)
    chosen, logprobs = tokens + 8 * num_rows * pieces, sums + 4 * num_rows * pieces
    join_pieces(tokens, peaks, sums, num_rows, pieces, chosen, logprobs)
    found = parts[-num_rows:].tolist()
    return numbers[-num_rows:].tolist(), found, [math.isfinite(logprob) for logprob in found]


@njit(**ENTRY)
def join_pieces(tokens: int, peaks: int, sums: int, rows: int, pieces: int, chosen: int, logprobs: int) -> None:
    """Find the first of the highest peaks, and its log-probability; NaN, if the peak is no number.

    Addresses: tokens int64, peaks, sums float32 [rows, pieces]; chosen int64 [rows]; logprobs float32 [rows]
    """
    for row in range(rows):
        best, total, has_nan = row * pieces, np.float32(0), False
        for piece in range(row * pieces, (row + 1) * pieces):
            has_nan = has_nan or np.isnan(read(floats(peaks), piece))
            if read(floats(peaks), piece) > read(floats(peaks), best):
                best = piece
        peak = read(floats(peaks), best)
        for piece in range(row * pieces, (row + 1) * pieces):
            if read(floats(peaks), piece) > -np.inf:  # a piece of nothing but -inf has no sum
                total += read(floats(sums), piece) * exp(read(floats(peaks), piece) - peak)
        put(integers(chosen), row, get(integers(tokens), best))
        write(floats(logprobs), row, -np.log(total) if np.isfinite(peak) and not has_nan else np.float32(np.nan))
