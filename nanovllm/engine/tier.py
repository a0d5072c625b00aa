"""Tier: a place that keeps evicted blocks and gives them back. Tiers combines several of them into one.

HostTier, in host_tier.py, keeps blocks in host memory.
"""

from collections.abc import Sequence
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

    def cancel(self, copies: list[BlockCopy]) -> None:
        """Stop the load of these copies. Its sources are still held."""

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


class Tiers:
    """Several tiers that act as one. A block is stored in all of them, and loaded from the first one that has it.

    Block 5 of tier 1, out of 3 tiers, has the number 5 * 3 + 1.
    """

    def __init__(self, tiers: Sequence[Tier]) -> None:
        self._tiers = list(tiers)

    def __contains__(self, block_hash: BlockHash) -> bool:
        return any(block_hash in tier for tier in self._tiers)

    def store(self, block: int, block_hash: BlockHash) -> None:
        for tier in self._tiers:
            tier.store(block, block_hash)

    def hold(self, hashes: list[BlockHash]) -> list[int]:
        held = []
        for block_hash in hashes:
            index = next(index for index, tier in enumerate(self._tiers) if block_hash in tier)
            [block] = self._tiers[index].hold([block_hash])
            held.append(block * len(self._tiers) + index)
        return held

    def release(self, held: list[int]) -> None:
        for number in held:
            block, index = divmod(number, len(self._tiers))
            self._tiers[index].release([block])

    def load(self, copies: list[BlockCopy]) -> None:
        started: list[tuple[Tier, list[BlockCopy]]] = []
        try:
            for tier, share in self._split(copies):
                tier.load(share)
                started.append((tier, share))
        except Exception:
            for tier, share in started:
                tier.cancel(share)
            raise

    def cancel(self, copies: list[BlockCopy]) -> None:
        for tier, share in self._split(copies):
            tier.cancel(share)

    def _split(self, copies: list[BlockCopy]) -> list[tuple[Tier, list[BlockCopy]]]:
        """Return each tier's share of the copies, with the tier's own block numbers."""
        shares: list[list[BlockCopy]] = [[] for _ in self._tiers]
        for number, target in copies:
            block, index = divmod(number, len(self._tiers))
            shares[index].append(BlockCopy(block, target))
        return [(tier, share) for tier, share in zip(self._tiers, shares, strict=True) if share]

    def has_arrived(self, blocks: list[int]) -> bool:
        for tier in self._tiers:  # noqa: SIM110  # all() is slower, and this runs for each sequence in each step
            if not tier.has_arrived(blocks):
                return False
        return True

    def collect(self, wait: bool = False) -> list[int]:
        return [block for tier in self._tiers for block in tier.collect(wait)]

    def arriving(self) -> list[int]:
        return [block for tier in self._tiers for block in tier.arriving()]

    def reset(self) -> None:
        for tier in self._tiers:
            tier.reset()

    def check_integrity(self) -> None:
        for tier in self._tiers:
            tier.check_integrity()
