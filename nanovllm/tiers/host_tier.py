"""HostTier: a pool in host memory for blocks that are evicted from the device, under the same hashes.

    device   [0][1][2][3]          store   a cached block is evicted: its bytes are copied to a block of the host
    host     [0][1][2][3][4]..     load    a sequence hits a block that only the host has: the bytes are copied back

On CUDA, host memory is pinned. A store is launched on the compute stream, so it reads its block before a later step can
write to it. A load runs while steps compute, on its own stream: it first waits for all work launched before it, and an
event tells when it has arrived. On a CPU the same code runs, and each copy is complete when the call returns.
"""

from dataclasses import dataclass
from time import perf_counter

import torch
from torch import Tensor

from ..engine.block_pool import BlockPool
from ..engine.kv_cache import BlockCopy
from ..engine.observer import Observer
from ..engine.prefix_cache import BlockHash
from ..host_memory import allocate

MAX_DEFAULT_BYTES = 4 * 2**30  # limit of the default size, since other programs cannot use pinned memory


@dataclass(eq=False)
class Load:
    """Blocks on their way from the host (sources) to the device (targets)."""

    copies: list[BlockCopy]
    event: "torch.cuda.Event | None"  # None on a CPU, where the copies are complete
    begin: "torch.cuda.Event | None" = None  # before the first copy
    seconds: float = 0.0  # how long the copies took, if there are no events

    @property
    def targets(self) -> set[int]:
        return {copy.target for copy in self.copies}

    def has_arrived(self) -> bool:
        return self.event is None or self.event.query()


class HostTier:
    """A pool of `num_blocks` blocks in host memory.

    blocks   [num_blocks, num_layers, 2, block_size, num_kv_heads, head_dim]
    """

    def __init__(self, device_blocks: Tensor, num_blocks: int, observer: Observer) -> None:
        """Allocate the pool. `device_blocks` is KVCache.blocks. Raise ValueError if host memory has no room for it."""
        is_cuda = device_blocks.is_cuda
        shape = (num_blocks, *device_blocks.shape[1:])
        try:
            self.blocks = allocate(shape, device_blocks.dtype, torch.device("cpu"), pin_memory=is_cuda)
        except RuntimeError:
            size = num_blocks * device_blocks[0].nbytes
            raise ValueError(f"host memory has no room for a pool of {num_blocks:,} blocks, {size:,} bytes") from None
        self.num_blocks = num_blocks
        self.pool = BlockPool(num_blocks, Observer(), self._evict)  # its events are not the device's, and are ignored
        self.loads: list[Load] = []
        self.num_blocks_stored = self.num_blocks_loaded = 0
        self.num_useful_stores = 0  # stored blocks that were loaded at least once; the others were useless
        self._never_loaded: set[int] = set()  # host blocks whose store was useless so far
        self._device_blocks = device_blocks
        self._stream = torch.cuda.Stream(device_blocks.device) if is_cuda else None
        if self._stream:
            device_blocks.record_stream(self._stream)  # keep the pool's memory until the loads are done
        self._observer = observer

    def __contains__(self, block_hash: BlockHash) -> bool:
        return block_hash in self.pool.cached

    def save(self, block: int, block_hash: BlockHash, is_prompt: bool) -> None:
        """Do nothing: the host keeps only blocks that the device has no room for."""

    def store(self, block: int, block_hash: BlockHash) -> None:
        """Copy an evicted device block to the host, where it becomes the most recently used.

        If the host already has the hash, copy nothing, and make that block the most recently used. If all host blocks
        are held, do nothing. Count copied blocks in num_blocks_stored. Tell the observer "store" or "renew".
        """
        if block_hash in self:
            held = self.hold([block_hash])
            self.release(held)  # to the back of the free queue
            self._observer.tell("renew", held[0], block_hash)
        elif self.pool.free:
            [target] = self.pool.get_new_blocks(1)
            try:
                self.blocks[target].copy_(self._device_blocks[block], non_blocking=self._stream is not None)
                self.pool.cache_block(target, block_hash)
            finally:
                self.pool.free_blocks([target])
            self.num_blocks_stored += 1
            self._never_loaded.add(target)
            self._observer.tell("store", block, target, block_hash)

    def _evict(self, block: int, block_hash: BlockHash) -> None:
        self._observer.tell("host_evict", block, block_hash, "taken")

    def touch(self, hashes: list[BlockHash]) -> None:
        """Do nothing: store() marks a block as recently used when the block is evicted from the device."""

    def hold(self, hashes: list[BlockHash]) -> list[int]:
        """Hold the blocks with these hashes, and return them. They are not evicted until they are released."""
        assert all(block_hash in self for block_hash in hashes), "a block of the host was evicted before it was held"
        held = [self.pool.cached[block_hash] for block_hash in hashes]
        self.pool.touch(held)
        return held

    def release(self, held: list[int]) -> None:
        """Let held blocks be evicted again."""
        self.pool.free_blocks(held)

    def load(self, copies: list[BlockCopy]) -> None:
        """Start to copy held blocks (sources) to blocks of the device (targets). collect() releases the sources.

        If a copy raises, stop the whole load and raise the copy's error, with the sources still held.
        """
        if self._stream:  # earlier stores may still be writing the sources, and earlier steps reading the targets
            self._stream.wait_stream(torch.cuda.current_stream(self._device_blocks.device))
        try:
            with torch.cuda.stream(self._stream):  # does nothing for None
                started, begin = perf_counter(), self._record_event()
                for source, target in copies:
                    self._device_blocks[target].copy_(self.blocks[source], non_blocking=self._stream is not None)
                self.loads.append(Load(copies, self._record_event(), begin, perf_counter() - started))
        except Exception:
            if self._stream:
                self._stream.synchronize()
            raise
        self.num_blocks_loaded += len(copies)
        sources = {copy.source for copy in copies}
        self.num_useful_stores += len(self._never_loaded & sources)
        self._never_loaded -= sources

    def _record_event(self) -> "torch.cuda.Event | None":
        return self._stream.record_event(torch.cuda.Event(enable_timing=True)) if self._stream else None

    def has_arrived(self, blocks: list[int]) -> bool:
        """Return True if none of these device blocks is still being loaded."""
        return not self.loads or all(load.has_arrived() or load.targets.isdisjoint(blocks) for load in self.loads)

    def collect(self, wait: bool = False) -> tuple[list[int], list[int]]:
        """Release the sources of finished loads, and return their targets. With `wait`, wait for all loads first.

        The second list is always empty: a copy from host memory can't lose a block.
        """
        arrived = []
        for load in list(self.loads):
            if wait and load.event:
                load.event.synchronize()
            if load.has_arrived():
                self.loads.remove(load)
                self.release([copy.source for copy in load.copies])
                arrived += [copy.target for copy in load.copies]
                seconds = load.begin.elapsed_time(load.event) / 1000 if load.begin and load.event else load.seconds
                self._observer.tell("timed", "host", len(load.copies), seconds)
                self._observer.tell("arrive", load.copies)
        return arrived, []

    def arriving(self) -> list[int]:
        """Return the targets that collect() has not returned yet."""
        return [copy.target for load in self.loads for copy in load.copies]

    def reset(self) -> None:
        """Empty the tier. No block may be loading."""
        cached = list(self.pool.hashes.items())
        self.pool.reset_prefix_cache()
        for block, block_hash in cached:
            self._observer.tell("host_evict", block, block_hash, "reset")

    def check_integrity(self) -> None:
        """Raise AssertionError unless the loads hold their sources, and all other blocks are free."""
        self.pool.check_integrity([copy.source for load in self.loads for copy in load.copies])
