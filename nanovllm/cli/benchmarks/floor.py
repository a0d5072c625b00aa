"""What the machine needs at least: to read the weights once a step, and the keys and values of each token's context."""

import statistics
import time

import torch

from ...api import LLM
from ...checkpoints.sizes import parameters
from .workload import Task

MAX_BYTES, REPEATS = 1 << 28, 7  # larger than a processor's caches


def read_bandwidth(llm: LLM) -> float:
    """Bytes a second that this device reads now; for small models the same number of bytes, not their caches' speed."""
    memory = torch.ones(MAX_BYTES // 4, device=llm.llm_engine.device)  # [num_floats]
    seconds = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        memory.sum().item()  # waits for a GPU
        seconds.append(time.perf_counter() - started)
    return memory.nbytes / statistics.median(seconds)


def floor_seconds(llm: LLM, tasks: list[Task], num_steps: int, bandwidth: float) -> float:
    return (num_steps * weight_bytes(llm) + kv_bytes(llm, tasks)) / bandwidth


def weight_bytes(llm: LLM) -> int:
    """Of all weights that a step reads: of an embedding that is not also the head, it reads a few rows."""
    parts = parameters(llm.model_config)
    unread = 0 if llm.model_config.tie_word_embeddings else parts["embedding"]
    return (sum(parts.values()) - unread) * llm.llm_engine.dtype.itemsize


def kv_bytes(llm: LLM, tasks: list[Task]) -> int:
    """A decoded token reads those of all tokens before it; a prompt's reads are left out."""
    slots = sum(len(task.prompt) + i for task in tasks for i in range(1, task.num_tokens))
    return slots * llm.kv_cache.bytes_per_token
