"""The requests that every stage is measured on: random tokens, lengths drawn evenly, the same for every machine."""

import random
from typing import NamedTuple


class Request(NamedTuple):
    prompt_token_ids: list[int]
    num_output_tokens: int


def mixed_workload(
    vocab_size: int, num_requests: int = 32, low: int = 16, high: int = 256, seed: int = 0
) -> list[Request]:
    """Prompts and outputs of `low` to `high` tokens; each request must give exactly its output length.

    >>> [(len(prompt), out) for prompt, out in mixed_workload(4096, num_requests=2)]
    [(232, 114), (210, 243)]
    """
    rng = random.Random(seed)
    lengths = [(rng.randint(low, high), rng.randint(low, high)) for _ in range(num_requests)]
    return [Request([rng.randrange(3, vocab_size) for _ in range(prompt)], out) for prompt, out in lengths]
