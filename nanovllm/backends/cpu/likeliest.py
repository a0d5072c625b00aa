"""The likeliest token of each row, with its log-probability, in two passes over logits that stay in a core's cache.

The plain sampler first turns all logits into float32, then into log-probabilities, which takes several passes over
memory. A greedy row needs only its token, the largest logit, and log(sum(exp(logit - largest))).
"""

import numpy as np

from .layout import WIDTH
from .vectors import (
    Memory,
    add,
    exp,
    exp_of,
    get,
    kernel,
    lane_numbers,
    largest_of,
    largest_or_nan,
    load,
    maximum,
    maximum_or_nan,
    negative,
    put,
    read,
    splat,
    sum_of,
    where_below,
    write,
    zeros,
)


@kernel
def peak_of(logits: Memory, size: int) -> tuple[np.int64, np.float32, np.float32]:
    """Return the index and the value of the largest logit, and the sum of exp(logit - largest).

    Of equal logits, the first one counts. NaN counts as the largest.
    """
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


@kernel
def join_parts(
    found: Memory, peaks: Memory, sums: Memory, rows: int, parts: int, tokens: Memory, logprobs: Memory
) -> None:
    """Merge the parts of each row into its likeliest token and that token's log-probability.

    The log-probability is NaN if the largest logit is not finite, or if a logit is NaN.

    found int64 [rows, parts]; peaks, sums float32 [rows, parts]; tokens int64 [rows]; logprobs float32 [rows]
    """
    for row in range(rows):
        best, total, has_nan = row * parts, np.float32(0), False
        for part in range(row * parts, (row + 1) * parts):
            has_nan = has_nan or np.isnan(read(peaks, part))
            if read(peaks, part) > read(peaks, best):
                best = part
        peak = read(peaks, best)
        for part in range(row * parts, (row + 1) * parts):
            if read(peaks, part) > -np.inf:  # a part that is all -inf has no valid sum
                total += read(sums, part) * exp(read(peaks, part) - peak)
        put(tokens, row, get(found, best))
        write(logprobs, row, -np.log(total) if np.isfinite(peak) and not has_nan else np.float32(np.nan))
