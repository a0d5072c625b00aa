"""Workloads of the course: prompts without text, and synthetic traffic that consists of lengths only."""

import random
from typing import NamedTuple

from nanovllm.bench.workload import Task, random_tokens


def even_prompt(num_tokens: int) -> list[int]:
    """Return a prompt whose tokens are all different, for counting.

    >>> even_prompt(4)
    [3, 4, 5, 6]
    """
    return list(range(3, 3 + num_tokens))


def published_tasks(vocab_size: int, count: int, low: int, high: int, temperature: float) -> list[Task]:
    """Return nano-vllm's published workload, drawn in its order: all prompts, then the lengths of all outputs."""
    rng, last = random.Random(0), min(10_000, vocab_size - 1)
    prompts = [[rng.randint(0, last) for _ in range(rng.randint(low, high))] for _ in range(count)]
    return [Task(prompt, rng.randint(low, high), temperature=temperature) for prompt in prompts]


def shared_prompts(vocab_size: int, prefix: int, tail: int, count: int) -> list[list[int]]:
    """Return `count` prompts with the same `prefix` tokens and `tail` tokens of their own.

    >>> a, b = shared_prompts(4096, prefix=3, tail=2, count=2)
    >>> (a[:3] == b[:3], a[3:] == b[3:], len(a))
    (True, False, 5)
    """
    rng = random.Random(0)
    first = random_tokens(rng, vocab_size, prefix)
    return [first + random_tokens(rng, vocab_size, tail) for _ in range(count)]


class Traffic(NamedTuple):
    """A request of synthetic traffic: only its lengths."""

    num_prompt_tokens: int
    max_tokens: int  # the client's limit, to be safe
    num_output_tokens: int  # the tokens it then needs

    @property
    def num_tokens(self) -> int:
        return self.num_prompt_tokens + self.num_output_tokens


def traffic(count: int, seed: int, mean_output: int = 150, longest: int = 1024) -> list[Traffic]:
    """Return prompts of 10 to 200 tokens, with mostly short outputs. Clients allow 1 to 4 times what they need."""
    rng = random.Random(seed)
    made = []
    for _ in range(count):
        num_prompt_tokens = rng.randint(10, 200)
        num_output_tokens = min(8 + int(rng.expovariate(1 / mean_output)), longest - num_prompt_tokens)
        max_tokens = min(int(num_output_tokens * rng.uniform(1, 4)), longest - num_prompt_tokens)
        made.append(Traffic(num_prompt_tokens, max_tokens, num_output_tokens))
    return made
