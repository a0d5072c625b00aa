"""The floor: the bytes that an engine must read, which are the weights in each step and the KV cache for each token."""

import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Self

import torch

from ..checkpoints.gguf import stored_tensors
from ..checkpoints.sizes import parameters, weight_bits
from .harness import seconds_of
from .workload import Task

if TYPE_CHECKING:
    from ..llm import LLM

NUM_BYTES, REPEATS = 1 << 28, 7  # bytes per read, more than a processor's caches hold; number of reads
EMBEDDING = "model.embed_tokens.weight"
GPU_SIZE_FACTOR = 16  # a GPU would read fewer bytes in less time than the launch takes


class Bandwidth:
    """A tensor too large for caches. Calling it reads the tensor once and returns the seconds."""

    def __init__(self, device: torch.device | None = None) -> None:
        is_cuda = device is not None and device.type == "cuda"
        self._memory = torch.ones(NUM_BYTES * (GPU_SIZE_FACTOR if is_cuda else 1) // 4, device=device)
        self.num_bytes = self._memory.nbytes

    def __call__(self) -> float:
        return seconds_of(lambda: self._memory.sum().item())  # waits for a GPU


def device_bandwidth(device: torch.device) -> float:
    """Measure how many bytes per second the device reads, and return the median."""
    probe = Bandwidth(device)
    return probe.num_bytes / statistics.median(probe() for _ in range(REPEATS))


def floor_note(bandwidth: float) -> str:
    """Return a line that explains the floor in a report."""
    return f"floor: reading the weights once per step, and the KV cache, at {bandwidth / 1e9:.1f} GB/s"


class Floor(NamedTuple):
    """The fewest bytes that an engine can read. It holds no reference to the engine, so the engine can be freed."""

    step_bytes: int  # the weights
    slot_bytes: int  # one token's keys and values

    @classmethod
    def of(cls, llm: "LLM", quantization: str | None = None) -> Self:
        """Return the floor of an engine, or of the same engine with its weights quantized."""
        return cls(weight_bytes(llm, quantization), llm.llm_engine.kv_cache.bytes_per_token)

    def num_bytes(self, tasks: Sequence[Task], num_steps: int) -> int:
        """Return the bytes of all steps: the weights in each step, and the context of each decoded token.

        Reads during prefill are not counted.
        """
        slots = sum(len(task.prompt) + i for task in tasks for i in range(1, task.num_output_tokens))
        return num_steps * self.step_bytes + slots * self.slot_bytes


def weight_bytes(llm: "LLM", quantization: str | None = None) -> int:
    """Return how many bytes of weights a step reads: all but the embedding, unless it is also the head.

    Integers of a GGUF file count as in the file: these are the fewest bytes, and some types take more in memory.
    """
    model, itemsize = llm.model_config, llm.llm_engine.dtype.itemsize
    stored = {} if quantization or llm.config.quantization else stored_tensors(Path(llm.config.model))
    if stored:
        skipped = None if model.tie_word_embeddings else EMBEDDING
        return sum(
            math.prod(each.shape) * itemsize if each.type in ("F32", "F16", "BF16") else each.num_bytes
            for name, each in stored.items()
            if name != skipped
        )
    parts, bits = parameters(model), weight_bits(model, quantization or llm.config.quantization, itemsize)
    unread = 0 if model.tie_word_embeddings else parts["embedding"] * itemsize
    return round(sum(parts.values()) * bits / 8) - unread
