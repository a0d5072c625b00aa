"""What bench published serves, and the least that a machine must read for it."""

import random
from typing import Any, NamedTuple

import torch

from ...checkpoints.model_config import read_model_config
from ...checkpoints.sizes import kv_bytes_per_token
from ...engine.block_manager import cdiv
from ...engine.config import EngineArgs, EngineConfig
from ...llama import ModelConfig
from .answers import Answer
from .floor import slots_read, weights_read
from .workload import Task

LAST_ID = 10_000  # of a prompt's tokens; a smaller vocabulary has fewer
MAX_MODEL_LEN = 4096  # as that benchmark has it
WARM_UP_TOKENS = 8


class Load(NamedTuple):
    """What is served, and by what."""

    config: EngineConfig
    model: ModelConfig
    tasks: list[Task]

    @property
    def dtype(self) -> torch.dtype:
        return self.config.torch_dtype(self.model.dtype)

    def floor_bytes(self, answer: Answer) -> int:
        """What was to be read at least: the weights once a step, and the keys and values before each token.

        Computing the prompts is left out: on a GPU it is a small part.
        """
        made = [Task(task.prompt, len(tokens)) for task, tokens in zip(self.tasks, answer.tokens, strict=True)]
        lengths = [task.num_tokens for task in made]
        num_steps = max(max(lengths), cdiv(sum(lengths), self.config.max_num_seqs))
        itemsize = self.dtype.itemsize
        weights, slots = weights_read(self.model) * itemsize, slots_read(made)
        return num_steps * weights + slots * kv_bytes_per_token(self.model, itemsize)


def make_load(engine: dict[str, Any], num_requests: int, min_len: int, max_len: int, temperature: float) -> Load:
    """Raises ValueError if the model has too few positions."""
    if min_len > max_len:
        raise ValueError(f"--min-len {min_len} is above --max-len {max_len}")
    config = EngineArgs(**engine).engine_config()
    model = read_model_config(config.model)
    longest = config.max_model_len or min(MAX_MODEL_LEN, model.max_position_embeddings)
    config = EngineArgs(**engine | {"max_model_len": longest}).engine_config()
    tasks = published_tasks(model.vocab_size, num_requests, min_len, max_len, temperature)
    needed = max(len(task.prompt) + task.num_tokens for task in tasks)
    if needed > longest:
        raise ValueError(f"a prompt and its output have {needed} tokens: max_model_len is {longest}")
    return Load(config, model, tasks)


def published_tasks(vocab_size: int, count: int, low: int, high: int, temperature: float) -> list[Task]:
    """Drawn in the order of that benchmark: all prompts, then all lengths of outputs."""
    rng, last = random.Random(0), min(LAST_ID, vocab_size - 1)
    prompts = [[rng.randint(0, last) for _ in range(rng.randint(low, high))] for _ in range(count)]
    return [Task(prompt, rng.randint(low, high), temperature) for prompt in prompts]


def warm_up(tasks: list[Task]) -> list[Task]:
    first = tasks[0]
    return [Task(first.prompt, min(first.num_tokens, WARM_UP_TOKENS), first.temperature)]
