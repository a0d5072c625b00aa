"""HostTier: a pool in host memory for blocks that are evicted from the device, under the same hashes.

    device   [0][1][2][3]          store   a cached block is evicted: its bytes are copied to a block of the host
    host     [0][1][2][3][4]..     load    a sequence hits a block that only the host has: the bytes are copied back

On CUDA, host memory is pinned. A store is launched on the compute stream, so it reads its block before a later step can
write to it. A load runs while steps compute, on its own stream: it first waits for all work launched before it, and an
event tells when it has arrived. On a CPU the same code runs, and each copy is complete when the call returns.

Every rank has such a pool, for its part of each block. Rank 0 decides what is copied, and the others copy it, too.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from .block_pool import BlockPool
from .kv_cache import BlockCopy
from .observer import Observer
from .prefix_cache import BlockHash
from .ranks import Ranks


@dataclass(eq=False)
class Load:
    """Blocks on their way from the host (sources) to the device (targets)."""

    copies: list[BlockCopy]
    event: "torch.cuda.Event | None"  # None on a CPU, where the copies are complete

    @property
    def targets(self) -> set[int]:
        return {copy.target for copy in self.copies}

    def has_arrived(self) -> bool:
        return self.event is None or self.event.query()


class HostTier:
    """A pool of `num_blocks` blocks in host memory, behind the device's.

    blocks   [num_blocks, num_layers, 2, block_size, num_kv_heads, head_dim]
    """

    def __init__(self, device_blocks: Tensor, num_blocks: int, observer: Observer, ranks: Ranks | None = None) -> None:
        """Allocate the pool. `device_blocks` is KVCache.blocks. By default, there are no other ranks."""
        is_cuda = device_blocks.is_cuda
        self.blocks = torch.empty((num_blocks, *device_blocks.shape[1:]), dtype=device_blocks.dtype, pin_memory=is_cuda)
        self.pool = BlockPool(num_blocks, Observer(), self._evict)  # its events are not the device's, and are ignored
        self.loads: list[Load] = []
        self.num_blocks_stored = self.num_blocks_loaded = 0
        self._device_blocks = device_blocks
        self._stream = torch.cuda.Stream(device_blocks.device) if is_cuda else None
        self._observer, self._ranks = observer, ranks or Ranks()

    def __contains__(self, block_hash: BlockHash) -> bool:
        return block_hash in self.pool.cached

    def store(self, block: int, block_hash: BlockHash) -> None:
        """Copy an evicted block of the device to the host, where it becomes the most recently used one.

        If the host has the hash already, copy nothing, and make that block the most recently used one. If all blocks of
        the host are held, do nothing. Count copied blocks in num_blocks_stored. Tell the observer "store" or "renew".
        """
        if block_hash in self:
            held = self.hold([block_hash])
            self.release(held)  # to the back of the free queue
            self._observer.tell("renew", held[0], block_hash)
        elif self.pool.free:
            [target] = self.pool.get_new_blocks(1)
            self.blocks[target].copy_(self._device_blocks[block], non_blocking=self._stream is not None)
            self._ranks.tell("store", block, target)
            self.pool.cache_block(target, block_hash)
            self.pool.free_blocks([target])
            self.num_blocks_stored += 1
            self._observer.tell("store", block, target, block_hash)

    def _evict(self, block: int, block_hash: BlockHash) -> None:
        self._observer.tell("host_evict", block, block_hash, "taken")

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
        """Start to copy held blocks (sources) to blocks of the device (targets), and append the Load to `loads`.

        collect() releases the sources. Count the blocks in num_blocks_loaded. On CUDA, the copies run on the tier's
        stream, after all work launched before them, and an event shows when they have arrived.
        """
        self._ranks.tell("load", copies)
        if self._stream:  # earlier stores may still be writing the sources, and earlier steps reading the targets
            self._stream.wait_stream(torch.cuda.current_stream(self._device_blocks.device))
        with torch.cuda.stream(self._stream):  # does nothing for None
            for source, target in copies:
                self._device_blocks[target].copy_(self.blocks[source], non_blocking=self._stream is not None)
            self.loads.append(Load(copies, self._stream.record_event() if self._stream else None))
        self.num_blocks_loaded += len(copies)

    def has_arrived(self, blocks: list[int]) -> bool:
        """Return True if none of these device blocks is still on its way."""
        return all(load.has_arrived() or load.targets.isdisjoint(blocks) for load in self.loads)

    def collect(self, wait: bool = False) -> list[int]:
        """Release the sources of the loads that have arrived, and return their targets. Or `wait` for all loads."""
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

    def check_integrity(self) -> None:
        """Raise AssertionError unless the loads hold their sources, and all other blocks are free."""
        self.pool.check_integrity([copy.source for load in self.loads for copy in load.copies])
