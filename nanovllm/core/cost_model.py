"""CostModel: is it cheaper to bring a preempted group's blocks back from the host, or to compute them again?

    swap        bytes out and bytes in again / bandwidth of the copies
    recompute   tokens / speed of a prefill

Both grow with the context, so the answer hardly depends on its length: it is a ratio of two speeds of the machine.
"""

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .offload import HostPool, Traffic
from .sampling import SamplingParams

if TYPE_CHECKING:
    from .engine import LLMEngine


@dataclass(frozen=True)
class CostModel:
    bytes_per_second: float  # of a copy between the tiers, one way
    tokens_per_second: float  # of a prefill

    def swap_seconds(self, num_bytes: int) -> float:
        """Out and in again."""
        return 2 * num_bytes / self.bytes_per_second

    def recompute_seconds(self, num_tokens: int) -> float:
        return num_tokens / self.tokens_per_second

    def prefers_swap(self, num_bytes: int, num_tokens: int) -> bool:
        """Whether a swap takes less time. If they take the same, nothing is copied.

        >>> model = CostModel(bytes_per_second=1e9, tokens_per_second=1000)
        >>> model.prefers_swap(num_bytes=50_000 * 16, num_tokens=16)
        True
        >>> model.prefers_swap(num_bytes=50_000_000 * 16, num_tokens=16)
        False
        """
        return self.swap_seconds(num_bytes) < self.recompute_seconds(num_tokens)

    def __str__(self) -> str:
        return f"copies {self.bytes_per_second / 1e9:.1f} GB/s, prefill {self.tokens_per_second:,.0f} tokens/s"


ROUNDS, BLOCKS = 3, 8  # the best of so many rounds, of so many blocks


def measure(engine: "LLMEngine") -> CostModel:
    """Both speeds on this machine, of some blocks back and forth and of a chunk of a prompt. Leaves no trace."""
    model = CostModel(copy_speed(engine.host_pool), prefill_speed(engine))
    engine.model_runner.num_steps = engine.model_runner.num_tokens = 0
    engine.block_manager.reset_prefix_cache()
    engine.host_pool.stored, engine.host_pool.loaded = Traffic(), Traffic()
    return model


def copy_speed(host_pool: HostPool) -> float:
    """Bytes a second, one way, there and back on average."""
    copies, seconds = {i: i for i in range(min(BLOCKS, host_pool.num_blocks, host_pool.num_device_blocks))}, []
    for _ in range(ROUNDS):
        started = time.perf_counter()
        host_pool.store(copies).wait()
        host_pool.load(copies).wait()
        seconds.append(time.perf_counter() - started)
    return 2 * len(copies) * host_pool.bytes_per_block / min(seconds)


def prefill_speed(engine: "LLMEngine") -> float:
    """Tokens a second of a prompt as long as a step, the model and the pool allow."""
    num_slots = engine.kv_cache.num_blocks * engine.config.block_size
    num_tokens = min(engine.config.max_num_batched_tokens, engine.max_model_len - 1, num_slots)
    [seq] = engine.input_processor.process("", [0] * num_tokens, SamplingParams(temperature=0.0, seed=0))
    engine.block_manager.allocate(seq)
    seconds = []
    for _ in range(ROUNDS):
        started = time.perf_counter()
        engine.model_runner.run([(seq, num_tokens)])
        seconds.append(time.perf_counter() - started)
    engine.block_manager.free(seq)
    return num_tokens / min(seconds)
