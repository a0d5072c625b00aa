"""HostTier: room in host memory for blocks that are evicted from the device, under the same hashes.

    device   [0][1][2][3]          store   a cached block is evicted: its bytes move to a block of the host
    host     [0][1][2][3][4]..     load    a sequence begins with a text that only the host has: the bytes come back

On CUDA host memory is pinned. A store joins the compute stream, so it reads its block before a later step can write to
it. A load runs on a stream of its own, beside the steps; it first waits for everything launched before, and an event
tells when it has arrived. Elsewhere a copy is complete when the call returns, and the same code runs.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from .block_pool import BlockPool
from .kv_cache import BlockCopy
from .observer import Observer
from .prefix_cache import BlockHash

MAX_DEFAULT_BYTES = 4 * 2**30  # limit of the default size, since no other program can use pinned memory


@dataclass(eq=False)
class Load:
    """Blocks on their way from the host (sources) to the device (targets)."""

    copies: list[BlockCopy]
    event: "torch.cuda.Event | None"  # None if they arrived at once

    @property
    def targets(self) -> set[int]:
        return {copy.target for copy in self.copies}

    def has_arrived(self) -> bool:
        return self.event is None or self.event.query()


class HostTier:
    """A pool of `num_blocks` blocks in host memory, next to the device's.

    blocks   [num_blocks, num_layers, 2, block_size, num_kv_heads, head_dim]
    """

    def __init__(self, device_blocks: Tensor, num_blocks: int, observer: Observer) -> None:
        """Allocate the pool. `device_blocks` is KVCache.blocks. Raise ValueError if they do not fit in host memory."""
        is_cuda = device_blocks.is_cuda
        shape = (num_blocks, *device_blocks.shape[1:])
        try:
            self.blocks = torch.empty(shape, dtype=device_blocks.dtype, pin_memory=is_cuda)
        except RuntimeError:
            size = num_blocks * device_blocks[0].nbytes
            raise ValueError(f"host memory has no room for a pool of {num_blocks:,} blocks, {size:,} bytes") from None
        self.num_blocks = num_blocks
        self.pool = BlockPool(num_blocks, Observer(), self._evict)
        self.loads: list[Load] = []
        self.num_blocks_stored = self.num_blocks_loaded = 0
        self.num_stores_loaded = 0  # stored blocks that were loaded at least once; the others were useless
        self._never_loaded: set[int] = set()  # blocks of the host
        self._device_blocks = device_blocks
        self._stream = torch.cuda.Stream(device_blocks.device) if is_cuda else None
        if self._stream:
            device_blocks.record_stream(self._stream)  # keep the pool's memory until the loads are done
        self._observer = observer

    def __contains__(self, block_hash: BlockHash) -> bool:
        return block_hash in self.pool.cached

    def store(self, block: int, block_hash: BlockHash) -> None:
        """Keep a copy of a device block that is about to be reused, as the most recently used one.

        Copy nothing if the hash is here already, or if every block of the host is being loaded from.
        """
        if block_hash in self:
            held = self.hold([block_hash])
            self.release(held)
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

    def hold(self, hashes: list[BlockHash]) -> list[int]:
        """Return the blocks with these hashes. They are not evicted until they are loaded or released."""
        held = [self.pool.cached[block_hash] for block_hash in hashes]
        self.pool.touch(held)
        return held

    def release(self, held: list[int]) -> None:
        """Let held blocks be evicted again."""
        self.pool.free_blocks(held)

    def load(self, copies: list[BlockCopy]) -> None:
        """Start to copy held blocks (sources) to blocks of the device (targets). collect() releases them.

        If a copy raises, stop everything: the sources are still held.
        """
        if self._stream:  # stores launched so far may still write what is read here, and steps read what is overwritten
            self._stream.wait_stream(torch.cuda.current_stream(self._device_blocks.device))
        try:
            with torch.cuda.stream(self._stream):  # does nothing for None
                for source, target in copies:
                    self._device_blocks[target].copy_(self.blocks[source], non_blocking=self._stream is not None)
                self.loads.append(Load(copies, self._stream.record_event() if self._stream else None))
        except Exception:
            if self._stream:
                self._stream.synchronize()
            raise
        self.num_blocks_loaded += len(copies)
        sources = {copy.source for copy in copies}
        self.num_stores_loaded += len(self._never_loaded & sources)
        self._never_loaded -= sources

    def has_arrived(self, blocks: list[int]) -> bool:
        """Return True if none of these device blocks is on its way."""
        return all(load.has_arrived() or load.targets.isdisjoint(blocks) for load in self.loads)

    def collect(self, wait: bool = False) -> list[int]:
        """Release what has been loaded, and return the device blocks that have arrived. `wait` for all of them."""
        arrived = []
        for load in list(self.loads):
            if wait and load.event:
                load.event.synchronize()
            if load.has_arrived():
                self.loads.remove(load)
                self.release([copy.source for copy in load.copies])
                arrived += [copy.target for copy in load.copies]
                self._observer.tell("arrive", load.copies)
        return arrived

    def arriving(self) -> list[int]:
        """Return the targets that collect() has not returned yet."""
        return [copy.target for load in self.loads for copy in load.copies]

    def reset(self) -> None:
        """Empty the tier. No block may be loading."""
        texts = list(self.pool.hashes.items())
        self.pool.reset_prefix_cache()
        for block, block_hash in texts:
            self._observer.tell("host_evict", block, block_hash, "reset")

    def check_integrity(self) -> None:
        """Assert that exactly the blocks that are being loaded are held."""
        self.pool.check_integrity([copy.source for load in self.loads for copy in load.copies])
