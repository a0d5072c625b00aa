"""Workloads: prompts of random tokens, lengths typical of chats, and arrival times."""

import json
import math
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

# The mean lengths of ShareGPT's chats in tokens, from the paper on PagedAttention (arXiv:2309.06180, section 6.1).
# The paper plots both lengths as wide distributions with a long tail to the right; the widths here are our choice.
MEAN_INPUT, INPUT_WIDTH = 161.31, 1.2
MEAN_OUTPUT, OUTPUT_WIDTH = 337.99, 1.0
WORDS = (
    *("the", "and", "was", "her", "his", "said", "day", "little", "went", "saw", "big", "happy", "play", "tree"),
    *("girl", "boy", "dog", "cat", "ball", "time", "mom", "park", "friend", "home", "very", "with", "they", "them"),
)


class Task(NamedTuple):
    """A prompt, and the exact number of tokens in each sample, because benchmarks ignore EOS."""

    prompt: list[int]
    num_output_tokens: int
    n: int = 1  # samples
    temperature: float = 0.0

    @property
    def num_tokens(self) -> int:
        """The number of tokens when the task ends; all samples share the prompt."""
        return len(self.prompt) + self.n * self.num_output_tokens

    def shortened(self, num_tokens: int) -> "Task":
        """Return the same task with at most `num_tokens` tokens of output, for a warm-up."""
        return self._replace(num_output_tokens=min(self.num_output_tokens, num_tokens))


def random_tokens(rng: random.Random, vocab_size: int, count: int) -> list[int]:
    """Return random token ids. The ids 0 to 2, which may have no text, are left out."""
    return [rng.randrange(3, vocab_size) for _ in range(count)]


def around(rng: random.Random, length: int, spread: float) -> int:
    """Return a random length that differs from `length` by up to the fraction `spread`."""
    return max(1, round(length * rng.uniform(1 - spread, 1 + spread)))


def random_tasks(vocab_size: int, count: int, input_len: int, output_len: int, spread: float = 0.0) -> list[Task]:
    """Return tasks of random tokens. Lengths vary by up to the fraction `spread`."""
    rng = random.Random(0)
    lengths = [(around(rng, input_len, spread), around(rng, output_len, spread)) for _ in range(count)]
    return [Task(random_tokens(rng, vocab_size, prompt), output) for prompt, output in lengths]


def mixed_tasks(vocab_size: int, count: int = 32, low: int = 16, high: int = 256, seed: int = 0) -> list[Task]:
    """Return prompts and outputs of `low` to `high` tokens, drawn uniformly, so that requests end at different times.

    >>> [(len(task.prompt), task.num_output_tokens) for task in mixed_tasks(4096, 2)]
    [(232, 114), (210, 243)]
    """
    rng = random.Random(seed)
    lengths = [(rng.randint(low, high), rng.randint(low, high)) for _ in range(count)]
    return [Task(random_tokens(rng, vocab_size, prompt), output) for prompt, output in lengths]


def read_dataset(path: str, output_len: int) -> list[tuple[str, int]]:
    """Return the prompts in a file, each with the number of tokens in its output, `output_len` by default.

    The format is vLLM's custom dataset: JSON lines with "prompt", and "output_tokens" to override `output_len`. Raise
    ValueError for the first invalid line, and for a file without requests.
    """
    requests = []
    for number, line in enumerate(Path(path).read_bytes().splitlines(), start=1):
        if not line.strip():
            continue
        try:
            request = json.loads(line)
            prompt, num_tokens = request["prompt"], request.get("output_tokens", output_len)
        except (ValueError, KeyError, TypeError, RecursionError):
            text = line[:80].decode(errors="replace")
            raise ValueError(f'{path}, line {number}: expected {{"prompt": ...}}, got {text!r}') from None
        if not isinstance(prompt, str) or not prompt:
            raise ValueError(f"{path}, line {number}: prompt must be a string of at least 1 character, got {prompt!r}")
        if type(num_tokens) is not int or num_tokens < 1:
            raise ValueError(f"{path}, line {number}: output_tokens must be an integer, at least 1, got {num_tokens!r}")
        requests.append((prompt, num_tokens))
    if not requests:
        raise ValueError(f"{path} has no request")
    return requests


def check_lengths(tasks: Sequence[Task], max_model_len: int) -> None:
    """Raise ValueError for the first task that is longer than `max_model_len`."""
    for task in tasks:
        if task.num_tokens > max_model_len:
            total = f"{len(task.prompt)} + {task.num_output_tokens} tokens"
            raise ValueError(f"a prompt and its output have {total}, but max_model_len is {max_model_len}")


# ---- Requests for a server


def chat_lengths(rng: random.Random, longest: int) -> tuple[int, int]:
    """Return the lengths of a prompt and its output, limited to `longest` tokens in total."""
    prompt = min(log_normal(rng, MEAN_INPUT, INPUT_WIDTH), longest // 2)
    return prompt, min(log_normal(rng, MEAN_OUTPUT, OUTPUT_WIDTH), longest - prompt)


def log_normal(rng: random.Random, mean: float, width: float) -> int:
    """Draw a log-normal number, rounded, at least 1; `width` is the standard deviation of its logarithm."""
    return max(1, round(rng.lognormvariate(math.log(mean) - width**2 / 2, width)))


def chats(count: int, lengths: tuple[int, int] | None, longest: int, seed: int) -> list[tuple[str, int]]:
    """Return prompts of random words, each with the number of tokens in its output.

    `lengths` are the words of a prompt and the tokens of its output. By default, they are typical of chats.
    """
    rng, requests = random.Random(seed), []
    for _ in range(count):
        num_words, num_tokens = lengths or chat_lengths(rng, longest)
        requests.append((" ".join(rng.choices(WORDS, k=num_words)), num_tokens))
    return requests


def arrivals(count: int, rate: float, seed: int) -> Iterator[float]:
    """Yield arrival times in seconds: a Poisson process of `rate` requests per second, or all at 0.

    >>> list(arrivals(2, math.inf, 0))
    [0.0, 0.0]
    """
    rng, now = random.Random(seed), 0.0
    for _ in range(count):
        yield now
        now += rng.expovariate(rate) if rate < math.inf else 0.0
