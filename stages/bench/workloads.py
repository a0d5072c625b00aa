"""What is asked of the engines: random tokens, lengths that are drawn, the same on every machine."""

import random
from typing import NamedTuple


class Request(NamedTuple):
    prompt_token_ids: list[int]
    num_output_tokens: int  # exactly: the measurements ignore the end of a text
    n: int = 1  # samples

    @property
    def num_tokens(self) -> int:
        """What it holds in the end, if its samples share the prompt."""
        return len(self.prompt_token_ids) + self.n * self.num_output_tokens


def mixed_workload(
    vocab_size: int, num_requests: int = 32, low: int = 16, high: int = 256, seed: int = 0
) -> list[Request]:
    """Prompts and outputs of `low` to `high` tokens, lengths drawn evenly.

    >>> [(len(request.prompt_token_ids), request.num_output_tokens) for request in mixed_workload(4096, 2)]
    [(232, 114), (210, 243)]
    """
    rng = random.Random(seed)
    lengths = [(rng.randint(low, high), rng.randint(low, high)) for _ in range(num_requests)]
    return [Request(random_tokens(rng, vocab_size, prompt), out) for prompt, out in lengths]


def random_tokens(rng: random.Random, vocab_size: int, count: int) -> list[int]:
    return [rng.randrange(3, vocab_size) for _ in range(count)]


def even_prompt(num_tokens: int) -> list[int]:
    """A prompt whose tokens are all different, for what is counted.

    >>> even_prompt(4)
    [3, 4, 5, 6]
    """
    return [3 + i for i in range(num_tokens)]


def shared_prompts(vocab_size: int, prefix: int, tail: int, count: int, seed: int = 0) -> list[list[int]]:
    """`count` prompts that begin with the same `prefix` tokens and go on with `tail` of their own.

    >>> a, b = shared_prompts(4096, prefix=3, tail=2, count=2)
    >>> (a[:3] == b[:3], a[3:] == b[3:], len(a))
    (True, False, 5)
    """
    rng = random.Random(seed)
    first = random_tokens(rng, vocab_size, prefix)
    return [first + random_tokens(rng, vocab_size, tail) for _ in range(count)]


def growing_workload(vocab_size: int, num_requests: int, prompt: int, output: int, spread: int) -> list[Request]:
    """Prompts of one length; outputs of `output` to `output + spread` tokens. Many fit as they begin, few as they end:
    so a small pool preempts.

    >>> [request.num_output_tokens for request in growing_workload(4096, 4, prompt=8, output=100, spread=30)]
    [100, 107, 114, 121]
    """
    rng = random.Random(0)
    lengths = [output + 7 * number % (spread + 1) for number in range(num_requests)]
    return [Request(random_tokens(rng, vocab_size, prompt), length) for length in lengths]


# ---- traffic


class Traffic(NamedTuple):
    """A request of made-up traffic, in lengths alone."""

    num_prompt_tokens: int
    max_tokens: int  # what the client asks for, to be safe
    num_output_tokens: int  # what it then needs

    @property
    def num_tokens(self) -> int:
        return self.num_prompt_tokens + self.num_output_tokens


def traffic(count: int, seed: int, mean_output: int = 150, longest: int = 1024) -> list[Traffic]:
    """Prompts of 10 to 200 tokens; outputs mostly short, some long; clients ask for 1 to 4 times what they need."""
    rng = random.Random(seed)
    made = []
    for _ in range(count):
        num_prompt_tokens = rng.randint(10, 200)
        num_output_tokens = min(8 + int(rng.expovariate(1 / mean_output)), longest - num_prompt_tokens)
        max_tokens = min(int(num_output_tokens * rng.uniform(1, 4)), longest - num_prompt_tokens)
        made.append(Traffic(num_prompt_tokens, max_tokens, num_output_tokens))
    return made
