"""Tier: a place that keeps evicted blocks and gives them back. HostTier, in host_tier.py, keeps them in host memory."""

from typing import Protocol

from .kv_cache import BlockCopy
from .prefix_cache import BlockHash


class Tier(Protocol):
    """The interface between BlockManager and a second tier. Each tier numbers its own blocks."""

    def __contains__(self, block_hash: BlockHash) -> bool:
        """Return True if the tier has a block with this hash."""

    def store(self, block: int, block_hash: BlockHash) -> None:
        """Keep a copy of a device block that is about to be reused, if there is room."""

    def hold(self, hashes: list[BlockHash]) -> list[int]:
        """Return the blocks with these hashes, and keep them from eviction until they are loaded or released."""

    def release(self, held: list[int]) -> None:
        """Allow held blocks to be evicted again."""

    def load(self, copies: list[BlockCopy]) -> None:
        """Start copying held blocks (sources) to blocks of the device (targets). collect() releases them.

        If a copy raises, stop everything: the sources are still held.
        """

    def has_arrived(self, blocks: list[int]) -> bool:
        """Return True unless one of these device blocks is still being loaded."""

    def collect(self, wait: bool = False) -> list[int]:
        """Release the sources of finished loads, and return their targets. With `wait`, wait for all loads."""

    def arriving(self) -> list[int]:
        """Return the targets that collect() has not returned yet."""

    def reset(self) -> None:
        """Empty the tier. No block may be loading."""

    def check_integrity(self) -> None:
        """Raise AssertionError unless exactly the blocks that are loading are held."""
