"""Tiers: the host and the disk, combined into one tier."""

from itertools import chain

from ..engine.kv_cache import BlockCopy
from ..engine.prefix_cache import BlockHash
from ..engine.tier import Tier


class Tiers:
    """Two tiers that act as one. If both have a block, it is loaded from the first."""

    def __init__(self, first: Tier, second: Tier, num_first_blocks: int) -> None:
        """Combine two tiers. The first numbers its blocks from 0 on, the second from `num_first_blocks` on."""
        self._first, self._second, self._boundary = first, second, num_first_blocks
        self._both = (first, second)

    def __contains__(self, block_hash: BlockHash) -> bool:
        return block_hash in self._first or block_hash in self._second

    def save(self, block: int, block_hash: BlockHash, is_prompt: bool) -> None:
        """Offer a computed block to both tiers."""
        for tier in self._both:
            tier.save(block, block_hash, is_prompt)

    def store(self, block: int, block_hash: BlockHash) -> None:
        """Offer an evicted block to both tiers."""
        for tier in self._both:
            tier.store(block, block_hash)

    def touch(self, hashes: list[BlockHash]) -> None:
        """Tell both tiers that these blocks were used."""
        for tier in self._both:
            tier.touch(hashes)

    def hold(self, hashes: list[BlockHash]) -> list[int]:
        """Hold each block in the first tier that has it."""
        return [self._both[each not in self._first].hold([each])[0] for each in hashes]

    def release(self, held: list[int]) -> None:
        """Let held blocks be evicted again."""
        for tier, blocks in zip(self._both, self._split(held), strict=True):
            tier.release(blocks)

    def load(self, copies: list[BlockCopy]) -> None:
        """Start the loads of both tiers. The second tier's load must not raise: the first tier's would go on."""
        of_first, of_second = self._split([copy.source for copy in copies])
        for tier, sources in ((self._first, {*of_first}), (self._second, {*of_second})):
            if sources:
                tier.load([copy for copy in copies if copy.source in sources])

    def has_arrived(self, blocks: list[int]) -> bool:
        """Return True if none of these device blocks is still being loaded from either tier."""
        return self._first.has_arrived(blocks) and self._second.has_arrived(blocks)

    def collect(self, wait: bool = False) -> tuple[list[int], list[int]]:
        """Return the targets that have arrived from either tier, and the lost ones. With `wait`, wait for all loads."""
        arrived, lost = zip(*(tier.collect(wait) for tier in self._both), strict=True)
        return [*chain(*arrived)], [*chain(*lost)]

    def arriving(self) -> list[int]:
        """Return the targets that collect() has not returned yet."""
        return self._first.arriving() + self._second.arriving()

    def reset(self) -> None:
        """Empty both tiers."""
        for tier in self._both:
            tier.reset()

    def check_integrity(self) -> None:
        """Raise AssertionError unless exactly the blocks that are loading are held."""
        for tier in self._both:
            tier.check_integrity()

    def _split(self, held: list[int]) -> tuple[list[int], list[int]]:
        """Return which of these blocks belong to the first tier, and which to the second."""
        return [each for each in held if each < self._boundary], [each for each in held if each >= self._boundary]
