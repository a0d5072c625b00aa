"""What the machine needs at least: to read the weights once a step, and the keys and values of each token's context."""

import statistics
import time

import torch

from ...checkpoints.sizes import Dimensions, parameters
from ...llm import LLM
from .workload import Task

MAX_BYTES, REPEATS = 1 << 28, 7  # larger than a processor's caches
TIMES_ON_GPU = 16  # so many bytes more: a GPU reads the others in the time that a launch takes


def read_bandwidth(llm: LLM) -> float:
    """Bytes a second that this device reads now; for small models the same number of bytes, not their caches' speed."""
    return device_bandwidth(llm.llm_engine.device)


def device_bandwidth(device: torch.device) -> float:
    num_bytes = MAX_BYTES * (TIMES_ON_GPU if device.type == "cuda" else 1)
    memory = torch.ones(num_bytes // 4, device=device)  # [num_floats]
    seconds = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        memory.sum().item()  # waits for a GPU
        seconds.append(time.perf_counter() - started)
    return memory.nbytes / statistics.median(seconds)


def floor_seconds(llm: LLM, tasks: list[Task], num_steps: int, bandwidth: float) -> float:
    return (num_steps * weight_bytes(llm) + kv_bytes(llm, tasks)) / bandwidth


def weight_bytes(llm: LLM) -> int:
    return weights_read(llm.model_config) * llm.llm_engine.dtype.itemsize


def kv_bytes(llm: LLM, tasks: list[Task]) -> int:
    return slots_read(tasks) * llm.kv_cache.bytes_per_token


def weights_read(model: Dimensions) -> int:
    """How many weights a step reads: of an embedding that is not also the head, it reads a few rows."""
    parts = parameters(model)
    return sum(parts.values()) - (0 if model.tie_word_embeddings else parts["embedding"])


def slots_read(tasks: list[Task]) -> int:
    """A decoded token reads those of all tokens before it; a prompt's reads are left out."""
    return sum(len(task.prompt) + i for task in tasks for i in range(1, task.num_tokens))
