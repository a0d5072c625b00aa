"""Tier: storage that keeps blocks and loads them back. HostTier keeps them in host memory, DiskTier in files.

    device    a hit costs nothing
    host      a hit costs a copy; has blocks that were evicted from the device
    disk      a hit costs a read; has blocks that this process or another one has computed

BlockManager looks for a block in this order. Tiers (../tiers/tiers.py) combines host and disk into one tier.
"""

from typing import Protocol

from .kv_cache import BlockCopy
from .prefix_cache import BlockHash


class Tier(Protocol):
    """The interface through which BlockManager uses the host and the disk. Each tier numbers its own blocks.

    BlockManager offers each block twice: to save() once it is computed, and to store() when it is evicted. A tier keeps
    it at one of these times.
    """

    def __contains__(self, block_hash: BlockHash) -> bool:
        """Return True if the tier has a block with this hash."""

    def save(self, block: int, block_hash: BlockHash, is_prompt: bool) -> None:
        """Keep a copy of a device block that has just been computed, unless the tier waits for its eviction."""

    def store(self, block: int, block_hash: BlockHash) -> None:
        """Keep a copy of a device block that is about to be reused, if there is room."""

    def touch(self, hashes: list[BlockHash]) -> None:
        """Mark the blocks with these hashes as recently used by a sequence, if the tier has them."""

    def hold(self, hashes: list[BlockHash]) -> list[int]:
        """Return the blocks with these hashes, and keep them from eviction until they are loaded or released."""

    def release(self, held: list[int]) -> None:
        """Allow held blocks to be evicted again."""

    def load(self, copies: list[BlockCopy]) -> None:
        """Start copying held blocks (sources) to blocks of the device (targets).

        collect() releases the sources. If a copy raises, stop the whole load and raise the copy's error, with the
        sources still held.
        """

    def has_arrived(self, blocks: list[int]) -> bool:
        """Return False while one of these device blocks is being loaded, or is lost and not collected yet.

        A tier may treat each load as a whole, so that all of its blocks arrive together.
        """

    def collect(self, wait: bool = False) -> tuple[list[int], list[int]]:
        """Release the sources of finished loads, and return their targets: those that have arrived, and the lost ones.

        A lost block was damaged, or removed by another process, so its target holds garbage. With `wait`, wait for all
        loads.
        """

    def arriving(self) -> list[int]:
        """Return the targets that collect() has not returned yet."""

    def reset(self) -> None:
        """Empty the tier. No block may be loading."""

    def check_integrity(self) -> None:
        """Raise AssertionError unless exactly the blocks that are loading are held."""
