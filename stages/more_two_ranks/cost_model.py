"""CostModel: the choice between loading a block from the host and computing its tokens again.

    load        bytes of the block / bandwidth from the host
    recompute   tokens of the block / speed of a prefill

Both times grow with the number of tokens, so the answer depends on a ratio of two speeds of the machine, measured once.
The model leaves out fixed costs, and the cost of stores, although many stored blocks are never loaded. The speed of a
store is measured, too, for readers to judge.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from .block_manager import BlockManager
from .host_tier import HostTier
from .input_processor import InputProcessor
from .kv_cache import BlockCopy, KVCache
from .model_runner import ModelRunner
from .observer import Observer
from .sampling import SamplingParams

NUM_BLOCKS = 8  # copied at a time to measure a bandwidth


@dataclass(frozen=True)
class CostModel:
    """The speeds of a machine, and the choice between loading and computing."""

    load_bytes_per_second: float
    store_bytes_per_second: float
    tokens_per_second: float  # of a prefill

    def prefers_load(self, bytes_per_token: int) -> bool:
        """Return True if loading the keys and values of a token is faster than computing them.

        >>> model = CostModel(load_bytes_per_second=1e9, store_bytes_per_second=1e9, tokens_per_second=1000)
        >>> model.prefers_load(bytes_per_token=50_000), model.prefers_load(bytes_per_token=5_000_000)
        (True, False)
        """
        return bytes_per_token / self.load_bytes_per_second < 1 / self.tokens_per_second


def measure(kv_cache: KVCache, runner: ModelRunner, input_processor: InputProcessor, num_tokens: int) -> CostModel:
    """Measure the speeds of this machine, with a prefill of `num_tokens`. It overwrites blocks of the pool."""
    num_blocks = min(NUM_BLOCKS, kv_cache.num_blocks)
    tier = HostTier(kv_cache.blocks, num_blocks, Observer())

    def store(attempt: int) -> None:
        for block in range(num_blocks):
            tier.store(block, bytes([attempt, block]))

    def load(attempt: int) -> None:
        held = tier.hold([bytes([1, block]) for block in range(num_blocks)])  # as store() has left them
        tier.load([BlockCopy(source, block) for block, source in enumerate(held)])
        tier.collect(wait=True)

    manager = BlockManager(kv_cache.num_blocks, kv_cache.block_size, False, tier, Observer())
    [seq] = input_processor.process("", [0] * num_tokens, SamplingParams(temperature=0.0, seed=0))
    manager.allocate(seq, hits=[])
    store_seconds, load_seconds = best_time(store, kv_cache), best_time(load, kv_cache)
    prefill_seconds = best_time(lambda attempt: runner.run([(seq, num_tokens)]), kv_cache)
    num_bytes = num_blocks * kv_cache.blocks[0].nbytes
    runner.num_steps = runner.num_tokens = 0  # they count the work for requests
    return CostModel(num_bytes / load_seconds, num_bytes / store_seconds, num_tokens / prefill_seconds)


def best_time(work: Callable[[int], object], kv_cache: KVCache) -> float:
    """Return the seconds of the faster one of two runs. The first one also warms up."""
    seconds = []
    for attempt in range(2):
        started = time.perf_counter()
        work(attempt)
        if kv_cache.blocks.is_cuda:
            torch.cuda.synchronize(kv_cache.blocks.device)
        seconds.append(time.perf_counter() - started)
    return min(seconds)
