"""Tier: where evicted blocks go, and come back from. HostTier is one; Tiers are several that look like one."""

from collections.abc import Sequence
from typing import Protocol

from .kv_cache import BlockCopy
from .prefix_cache import BlockHash


class Tier(Protocol):
    """All that BlockManager knows of a second tier. Its blocks have numbers of their own."""

    def __contains__(self, block_hash: BlockHash) -> bool:
        """Return True if the tier has a block with this hash."""

    def store(self, block: int, block_hash: BlockHash) -> None:
        """Keep a copy of a device block that is about to be reused, if there is room."""

    def hold(self, hashes: list[BlockHash]) -> list[int]:
        """Return the blocks with these hashes. They are not evicted until they are loaded or released."""

    def release(self, held: list[int]) -> None:
        """Let held blocks be evicted again."""

    def load(self, copies: list[BlockCopy]) -> None:
        """Start to copy held blocks (sources) to blocks of the device (targets). collect() releases them.

        If a copy raises, nothing moves, and the sources are still held.
        """

    def cancel(self, copies: list[BlockCopy]) -> None:
        """Forget the load of these copies, once nothing moves. Its sources are still held."""

    def has_arrived(self, blocks: list[int]) -> bool:
        """Return True if none of these device blocks is on its way."""

    def collect(self, wait: bool = False) -> list[int]:
        """Release what has been loaded, and return the device blocks that have arrived. `wait` for all of them."""

    def arriving(self) -> list[int]:
        """Return the device blocks that collect() has not returned yet."""

    def reset(self) -> None:
        """Forget all texts. None may be on its way."""

    def check_integrity(self) -> None:
        """Assert that exactly the blocks that are being loaded are held."""


class Tiers:
    """Several tiers as one. A block is stored in each of them, and loaded from the first that has it.

    Block 5 of tier 1 of 3 has the number 5 * 3 + 1.
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
        begun: list[tuple[Tier, list[BlockCopy]]] = []
        try:
            for tier, own in self._split(copies):
                tier.load(own)
                begun.append((tier, own))
        except Exception:
            for tier, own in begun:
                tier.cancel(own)
            raise

    def cancel(self, copies: list[BlockCopy]) -> None:
        for tier, own in self._split(copies):
            tier.cancel(own)

    def _split(self, copies: list[BlockCopy]) -> list[tuple[Tier, list[BlockCopy]]]:
        """Return the copies from each tier that has any, under its own numbers."""
        own: list[list[BlockCopy]] = [[] for _ in self._tiers]
        for number, target in copies:
            block, index = divmod(number, len(self._tiers))
            own[index].append(BlockCopy(block, target))
        return [(tier, of_tier) for tier, of_tier in zip(self._tiers, own, strict=True) if of_tier]

    def has_arrived(self, blocks: list[int]) -> bool:
        return all(tier.has_arrived(blocks) for tier in self._tiers)

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
