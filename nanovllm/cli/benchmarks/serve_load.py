"""What a server is asked for, and when: lengths as people's chats have them, arrivals as of people who do not wait."""

import math
import random
from collections.abc import Iterator
from typing import NamedTuple

# Chats that people have shared, in tokens: the means that the paper on paged attention tells (arXiv:2309.06180, section
# 6.1). It draws both as wide, with a long tail to the right; the widths here are ours.
MEAN_INPUT, INPUT_WIDTH = 161.31, 1.2
MEAN_OUTPUT, OUTPUT_WIDTH = 337.99, 1.0
WORDS = (
    *("the", "and", "was", "her", "his", "said", "day", "little", "went", "saw", "big", "happy", "play", "tree"),
    *("girl", "boy", "dog", "cat", "ball", "time", "mom", "park", "friend", "home", "very", "with", "they", "them"),
)


class Ask(NamedTuple):
    """A request: words or tokens for a prompt, and exactly how many tokens are to come."""

    prompt: str | list[int]
    num_words: int
    num_tokens: int


def chat_lengths(rng: random.Random, longest: int) -> tuple[int, int]:
    """Of a prompt and its output, together at most `longest`: the tail is cut, as a server would cut it."""
    prompt = log_normal(rng, MEAN_INPUT, INPUT_WIDTH)
    output = log_normal(rng, MEAN_OUTPUT, OUTPUT_WIDTH)
    prompt = min(prompt, longest // 2)
    return prompt, min(output, longest - prompt)


def log_normal(rng: random.Random, mean: float, width: float) -> int:
    """A whole number of 1 or more; the logarithm's standard deviation is `width`."""
    return max(1, round(rng.lognormvariate(math.log(mean) - width**2 / 2, width)))


def asks(count: int, lengths: tuple[int, int] | None, longest: int, seed: int) -> list[Ask]:
    """`lengths` are those of all; None: drawn as of chats."""
    rng = random.Random(seed)
    made = []
    for _ in range(count):
        num_words, num_tokens = lengths or chat_lengths(rng, longest)
        made.append(Ask(" ".join(rng.choices(WORDS, k=num_words)), num_words, num_tokens))
    return made


def arrivals(count: int, rate: float, seed: int) -> Iterator[float]:
    """Seconds from the start: a Poisson process of `rate` a second, or all at once.

    >>> list(arrivals(2, math.inf, 0))
    [0.0, 0.0]
    """
    rng, now = random.Random(seed), 0.0
    for _ in range(count):
        yield now
        now += rng.expovariate(rate) if rate < math.inf else 0.0
