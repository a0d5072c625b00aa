"""What is served: prompts of random tokens, or those of a file."""

import random
from dataclasses import dataclass

from ...engine.sampling_params import SamplingParams
from ...llm import LLM
from ..streams import read_prompt

SEED = 0


@dataclass(frozen=True)
class Task:
    """A prompt, and exactly how many tokens it is to get."""

    prompt: list[int]
    num_tokens: int
    temperature: float = 0.0

    def params(self) -> SamplingParams:
        return SamplingParams(temperature=self.temperature, max_tokens=self.num_tokens, ignore_eos=True)


def random_tasks(llm: LLM, count: int, input_len: int, output_len: int, spread: float = 0.0) -> list[Task]:
    """Lengths are up to `spread` shorter or longer. Raises ValueError if the model has too few positions."""
    rng = random.Random(SEED)
    lengths = [(around(input_len, spread, rng), around(output_len, spread, rng)) for _ in range(count)]
    for prompt, output in lengths:
        check_length(llm, prompt, output)
    return [Task(random_tokens(llm, prompt, rng), output) for prompt, output in lengths]


def mixed_tasks(llm: LLM, count: int = 32, low: int = 16, high: int = 256) -> list[Task]:
    """Prompts and outputs of `low` to `high` tokens, lengths drawn evenly: no batch has its requests end together."""
    rng = random.Random(SEED)
    lengths = [(rng.randint(low, high), rng.randint(low, high)) for _ in range(count)]
    vocab_size = llm.model_config.vocab_size
    return [Task([rng.randrange(3, vocab_size) for _ in range(prompt)], output) for prompt, output in lengths]


def around(length: int, spread: float, rng: random.Random) -> int:
    """
    >>> around(10, 0.0, random.Random(0)), around(1, 0.9, random.Random(0))
    (10, 2)
    """
    return max(1, round(length * rng.uniform(1 - spread, 1 + spread)))


def random_tokens(llm: LLM, count: int, rng: random.Random) -> list[int]:
    """Token 0 may stand for nothing: it is left out."""
    return [rng.randrange(1, llm.model_config.vocab_size) for _ in range(count)]


def tasks_of_file(llm: LLM, file: str, output_len: int) -> list[Task]:
    """A task for each line. Raises ValueError for a prompt that the model cannot take; OSError if it is no file."""
    if llm.tokenizer is None:
        raise ValueError("the checkpoint has no tokenizer: prompts of a file need one")
    prompts = [llm.tokenizer.encode(line) for line in read_prompt(file).split("\n") if line.strip()]
    if not prompts:
        raise ValueError(f"{file}: there is no prompt in it")
    for prompt in prompts:
        check_length(llm, len(prompt), output_len)
    return [Task(prompt, output_len) for prompt in prompts]


def check_length(llm: LLM, input_len: int, output_len: int) -> None:
    if input_len + output_len > llm.max_model_len:
        total = f"{input_len} + {output_len} tokens"
        raise ValueError(f"a prompt and its output have {total}: max_model_len is {llm.max_model_len}")
