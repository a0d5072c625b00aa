"""Tier: a place that keeps blocks and gives them back. HostTier keeps them in host memory, DiskTier in files.

    device    a hit costs nothing
    host      a copy to the device; blocks that were evicted from there
    disk      a read; blocks that this process or another one has computed

BlockManager looks for a block in this order. Tiers makes one tier of the last two.
"""

from itertools import chain
from typing import Protocol

from .kv_cache import BlockCopy
from .prefix_cache import BlockHash


class Tier(Protocol):
    """The interface between BlockManager and the tiers behind the device. Each tier numbers its own blocks."""

    def __contains__(self, block_hash: BlockHash) -> bool:
        """Return True if the tier has a block with this hash."""

    def save(self, block: int, block_hash: BlockHash, is_prompt: bool) -> None:
        """Keep a copy of a device block that has just been computed, if the tier does not wait for its eviction."""

    def store(self, block: int, block_hash: BlockHash) -> None:
        """Keep a copy of a device block that is about to be reused, if there is room."""

    def touch(self, hashes: list[BlockHash]) -> None:
        """Note that a sequence has used its blocks with these hashes until now. The tier need not have them."""

    def hold(self, hashes: list[BlockHash]) -> list[int]:
        """Return the blocks with these hashes, and keep them from eviction until they are loaded or released."""

    def release(self, held: list[int]) -> None:
        """Allow held blocks to be evicted again."""

    def load(self, copies: list[BlockCopy]) -> None:
        """Start copying held blocks (sources) to blocks of the device (targets). collect() releases them.

        If a copy raises, stop everything: the sources are still held.
        """

    def has_arrived(self, blocks: list[int]) -> bool:
        """Return True unless one of these device blocks is still being loaded, or is lost and not collected yet."""

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


class Tiers:
    """Two tiers as one. If both have a block, it comes from the first one."""

    def __init__(self, first: Tier, second: Tier, num_first: int) -> None:
        """Join two tiers. The first one's blocks are numbered below `num_first`, and the second one's from there on."""
        self._first, self._second, self._num_first = first, second, num_first
        self._both = (first, second)

    def __contains__(self, block_hash: BlockHash) -> bool:
        return block_hash in self._first or block_hash in self._second

    def save(self, block: int, block_hash: BlockHash, is_prompt: bool) -> None:
        """Offer a computed block to both."""
        for tier in self._both:
            tier.save(block, block_hash, is_prompt)

    def store(self, block: int, block_hash: BlockHash) -> None:
        """Offer an evicted block to both."""
        for tier in self._both:
            tier.store(block, block_hash)

    def touch(self, hashes: list[BlockHash]) -> None:
        """Tell both that these blocks were used."""
        for tier in self._both:
            tier.touch(hashes)

    def hold(self, hashes: list[BlockHash]) -> list[int]:
        """Hold each block where it is found first."""
        return [self._both[each not in self._first].hold([each])[0] for each in hashes]

    def release(self, held: list[int]) -> None:
        """Let held blocks be evicted again."""
        for tier, blocks in zip(self._both, self._split(held), strict=True):
            tier.release(blocks)

    def load(self, copies: list[BlockCopy]) -> None:
        """Start the loads of both. The second one's must not raise, because the first one's would go on."""
        of_first, of_second = self._split([copy.source for copy in copies])
        for tier, sources in ((self._first, {*of_first}), (self._second, {*of_second})):
            if sources:
                tier.load([copy for copy in copies if copy.source in sources])

    def has_arrived(self, blocks: list[int]) -> bool:
        """Return True if none of these device blocks is on its way from either."""
        return self._first.has_arrived(blocks) and self._second.has_arrived(blocks)

    def collect(self, wait: bool = False) -> tuple[list[int], list[int]]:
        """Return the targets that have arrived from both, and those that are lost."""
        arrived, lost = zip(*(tier.collect(wait) for tier in self._both), strict=True)
        return [*chain(*arrived)], [*chain(*lost)]

    def arriving(self) -> list[int]:
        """Return the targets that collect() has not returned yet."""
        return self._first.arriving() + self._second.arriving()

    def reset(self) -> None:
        """Empty both."""
        for tier in self._both:
            tier.reset()

    def check_integrity(self) -> None:
        """Raise AssertionError unless exactly the blocks that are loading are held."""
        for tier in self._both:
            tier.check_integrity()

    def _split(self, held: list[int]) -> tuple[list[int], list[int]]:
        """Return the blocks of the first tier, and those of the second one."""
        return [each for each in held if each < self._num_first], [each for each in held if each >= self._num_first]
