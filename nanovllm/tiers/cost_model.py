"""CostModel: whether to load a block from the host or the disk, or to compute its tokens again.

    load        bytes of the block / bandwidth from the tier
    recompute   tokens of the block / speed of a prefill

Both times grow with the number of tokens, so the choice depends on the ratio of two speeds of the machine, which are
measured before the first request. HitPolicy chooses for each hit, and corrects the speeds, since a machine that is busy
at the start looks slow.

The model leaves out fixed costs, and the cost of stores, although many stored blocks are never loaded. The speed of
stores is measured, too, but only for display.
"""

import os
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter

import torch

from ..engine.block_manager import BlockManager
from ..engine.executor import Executor, Scheduled
from ..engine.input_processor import InputProcessor
from ..engine.kv_cache import BlockCopy, KVCache
from ..engine.observer import Observer
from ..engine.prefix_cache import BlockHash
from ..engine.sequence import Sequence
from ..requests.sampling_params import SamplingParams
from .block_files import BlockFiles
from .host_tier import HostTier

NUM_MEASURED_BLOCKS = 8  # blocks to copy when a bandwidth is measured
NUM_FEW_TOKENS = 4  # tokens of a short prefill
MAX_RATIO = 2.0  # largest ratio of expected and observed speed at which the expected speed is kept
TRY_EVERY = 16  # of this many hits with slow blocks, one is loaded anyway, because the tier may have become faster


@dataclass(frozen=True)
class CostModel:
    """The speeds of a machine, which decide between loading and computing."""

    load_bytes_per_second: float
    store_bytes_per_second: float
    tokens_per_second: float  # of a prefill
    num_tokens: int = 512  # of a long prefill

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


class HitPolicy:
    """An observer that chooses how much of each hit to load, and corrects the speeds that it uses.

    The speed of a load or a long prefill replaces the old one if the two differ by more than a factor of MAX_RATIO.
    """

    def __init__(self, host: HostTier, kv_cache: KVCache, cost: CostModel, disk_cost: CostModel | None) -> None:
        """Start with the measured speeds. A disk that could not be measured counts as fast, so that it is tried."""
        disk_speed = disk_cost.load_bytes_per_second if disk_cost else float("inf")
        self.bytes_per_second = {"host": cost.load_bytes_per_second, "disk": disk_speed}
        self.tokens_per_second = cost.tokens_per_second
        self.num_declined_blocks = self.num_corrections = 0
        self._host, self._block_size, self._block_bytes = host, kv_cache.block_size, kv_cache.blocks[0].nbytes
        self._min_tokens = cost.num_tokens // 2  # in a shorter step, each token takes longer
        self._num_declined_hits = 0
        self._step_began = self._step_ended = 0.0

    def num_worth_loading(self, hashes: list[BlockHash | None]) -> int:
        """Return how many blocks of a hit to use so that the most time is saved. The rest are computed.

        `hashes` has the hash of each block, or None for a block on the device.
        """
        if self._is_trying:
            return len(hashes)
        # seconds saved by using 0, 1, 2, ... blocks
        saved = [0.0]
        for block_hash in hashes:
            tier = "host" if block_hash and block_hash in self._host else "disk"
            seconds = self._block_bytes / self.bytes_per_second[tier] if block_hash else 0.0
            saved.append(saved[-1] + self._block_size / self.tokens_per_second - seconds)
        return max(range(len(saved)), key=lambda count: (saved[count], count))

    @property
    def _is_trying(self) -> bool:
        return self._num_declined_hits % TRY_EVERY == TRY_EVERY - 1

    def on_admit(self, seq: Sequence, hits: list[int | None]) -> None:
        """Count the blocks that are computed instead of loaded."""
        self._num_declined_hits += seq.num_declined_blocks > 0 or (self._is_trying and None in hits)
        self.num_declined_blocks += seq.num_declined_blocks

    def on_timed(self, tier: str, num_blocks: int, seconds: float) -> None:
        """Compare a load with its tier's speed, and correct the speed if it is off."""
        observed = num_blocks * self._block_bytes / max(seconds, 1e-9)
        self.bytes_per_second[tier] = self._corrected(self.bytes_per_second[tier], observed, observed)

    def on_begin(self) -> None:
        """Record when this call of the engine begins."""
        self._step_began = perf_counter()

    def on_step(self, batch: list[Scheduled], updated: list[Sequence]) -> None:
        """Compare a prefill with the expected speed, and correct the speed if it is off.

        Only a range of its speed is known: the slowest speed if the prefill has run since the previous step ended, and
        the fastest if it has run only since this call of the engine began.
        """
        now, num_tokens = perf_counter(), sum(num_tokens for _, num_tokens in batch)
        if num_tokens >= self._min_tokens:
            starts = self._step_ended, max(self._step_ended, self._step_began)
            slowest, fastest = (num_tokens / max(now - start, 1e-9) for start in starts)
            self.tokens_per_second = self._corrected(self.tokens_per_second, slowest, fastest)
        self._step_ended = now

    def _corrected(self, speed: float, slowest: float, fastest: float) -> float:
        nearest = min(max(speed, slowest), fastest)
        is_off = max(speed / nearest, nearest / speed) > MAX_RATIO
        self.num_corrections += is_off
        return nearest if is_off else speed


def measure(
    kv_cache: KVCache,
    executor: Executor,
    input_processor: InputProcessor,
    num_tokens: int,
    minimum: Callable[[list[int]], list[int]] | None,
) -> CostModel:
    """Measure copies between host and device, and a prefill of `num_tokens`.

    With `minimum`, a few tokens may be enough: a longer prefill takes at least as long, so loads from the host are
    faster if they bring `num_tokens` tokens in that time. Ranks agree on that, because they compute together. The speed
    of a few tokens is too low to be compared with a disk's.

    Call this before the first request, because it overwrites the pool. Raise ValueError if the model's logits are NaN:
    no request could be served.
    """
    num_blocks = min(NUM_MEASURED_BLOCKS, kv_cache.num_blocks)
    tier = HostTier(kv_cache.blocks, num_blocks, Observer())

    def store(attempt: int) -> None:
        for block in range(num_blocks):
            tier.store(block, bytes([attempt, block]))

    def load(attempt: int) -> None:
        held = tier.hold([bytes([1, block]) for block in range(num_blocks)])  # the hashes of the last store()
        tier.load([BlockCopy(source, block) for block, source in enumerate(held)])
        tier.collect(wait=True)

    def prefill_seconds(num_tokens: int) -> float:
        [seq] = input_processor.process("", [0] * num_tokens, SamplingParams(temperature=0.0, seed=0))
        BlockManager(kv_cache.num_blocks, kv_cache.block_size, False, tier, Observer()).allocate(seq, hits=[])
        return best_time(lambda attempt: executor.launch([(seq, num_tokens)]).tokens(), kv_cache)

    store_seconds, load_seconds = best_time(store, kv_cache), best_time(load, kv_cache)
    seconds_to_load = load_seconds / (num_blocks * kv_cache.block_size) * num_tokens
    num_measured = num_tokens if minimum is None else min(NUM_FEW_TOKENS, num_tokens)
    try:
        seconds = prefill_seconds(num_measured)
        if minimum is not None and num_measured < num_tokens and minimum([int(seconds_to_load < seconds)]) == [0]:
            num_measured = num_tokens
            seconds = prefill_seconds(num_measured)
    except FloatingPointError as error:
        dtype = str(kv_cache.dtype).removeprefix("torch.")
        raise ValueError(f"the model's weights are damaged, or too large for dtype {dtype}: {error}") from None
    executor.num_steps = executor.num_tokens = 0  # these count only the work of requests
    num_bytes = num_blocks * kv_cache.blocks[0].nbytes
    return CostModel(num_bytes / load_seconds, num_bytes / store_seconds, num_measured / seconds, num_tokens)


def measure_disk(cost: CostModel, root: Path, block_bytes: int) -> CostModel:
    """Return `cost` with the disk's speeds in place of the host's. The files leave the page cache before they are read.

    Raise OSError if `root` cannot be written.
    """
    files = BlockFiles(root, f"measure-{os.getpid()}-{time.time_ns()}", max_bytes=2**63 - 1)
    hashes, data = [bytes([number]) for number in range(NUM_MEASURED_BLOCKS)], bytearray(os.urandom(block_bytes))
    try:
        started = time.perf_counter()
        for block_hash in hashes:
            files.write(block_hash, memoryview(data))
        written = time.perf_counter()
        files.drop_page_cache()
        dropped = time.perf_counter()
        for block_hash in hashes:
            files.read(block_hash, memoryview(data))
        read = time.perf_counter()
    finally:
        files.remove_all()
        shutil.rmtree(files.folder, ignore_errors=True)
    num_bytes = NUM_MEASURED_BLOCKS * block_bytes
    speeds = num_bytes / (read - dropped), num_bytes / (written - started)
    return replace(cost, load_bytes_per_second=speeds[0], store_bytes_per_second=speeds[1])


def best_time(work: Callable[[int], object], kv_cache: KVCache) -> float:
    """Run `work` twice, and return the seconds of the faster run. The first run is also a warm-up."""
    seconds = []
    for attempt in range(2):
        started = time.perf_counter()
        work(attempt)
        if kv_cache.blocks.is_cuda:
            torch.cuda.synchronize(kv_cache.blocks.device)
        seconds.append(time.perf_counter() - started)
    return min(seconds)
