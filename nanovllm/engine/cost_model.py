"""CostModel: the choice between loading a block from the host, or from the disk, and computing its tokens again.

    load        bytes of the block / bandwidth from the tier
    recompute   tokens of the block / speed of a prefill

Both times grow with the number of tokens, so the answer depends on a ratio of two speeds of the machine, measured once.
The model leaves out fixed costs, and the cost of stores, although many stored blocks are never loaded. The speed of a
store is measured, too, for readers to judge.
"""

import os
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from .block_manager import BlockManager
from .disk_tier import BlockFiles
from .executor import Executor
from .host_tier import HostTier
from .input_processor import InputProcessor
from .kv_cache import BlockCopy, KVCache
from .observer import Observer
from .sampling_params import SamplingParams

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

    def __str__(self) -> str:
        return (
            f"loads {self.load_bytes_per_second / 1e9:.1f} GB/s, stores {self.store_bytes_per_second / 1e9:.1f} GB/s, "
            f"prefill {self.tokens_per_second:,.0f} tokens/s"
        )


def measure(kv_cache: KVCache, executor: Executor, input_processor: InputProcessor, num_tokens: int) -> CostModel:
    """Measure this machine, with a prefill of `num_tokens`, before the first request: it overwrites the pool.

    Raise ValueError if the model's logits are NaN: no request could be served.
    """
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
    try:
        prefill_seconds = best_time(lambda attempt: executor.launch([(seq, num_tokens)]).tokens(), kv_cache)
    except FloatingPointError as error:
        dtype = str(kv_cache.dtype).removeprefix("torch.")
        raise ValueError(f"the model's weights are damaged, or too large for dtype {dtype}: {error}") from None
    executor.num_steps = executor.num_tokens = 0  # they count what requests need
    num_bytes = num_blocks * kv_cache.blocks[0].nbytes
    return CostModel(num_bytes / load_seconds, num_bytes / store_seconds, num_tokens / prefill_seconds)


def measure_disk(cost: CostModel, root: Path, block_bytes: int) -> CostModel:
    """Return `cost` with the speeds of the disk in place of the host's. Blocks are read from the disk, not from memory.

    Raise OSError if `root` cannot be written.
    """
    files = BlockFiles(root, f"measure-{os.getpid()}-{time.time_ns()}", max_bytes=2**63 - 1)
    names, data = [bytes([number]) for number in range(NUM_BLOCKS)], bytearray(os.urandom(block_bytes))
    try:
        started = time.perf_counter()
        for name in names:
            files.write(name, memoryview(data))
        written = time.perf_counter()
        files.drop_page_cache()
        dropped = time.perf_counter()
        for name in names:
            files.read(name, memoryview(data))
        read = time.perf_counter()
    finally:
        files.remove_all()
        shutil.rmtree(files.folder, ignore_errors=True)
    num_bytes = NUM_BLOCKS * block_bytes
    speeds = num_bytes / (read - dropped), num_bytes / (written - started)
    return replace(cost, load_bytes_per_second=speeds[0], store_bytes_per_second=speeds[1])


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
