"""Tier: where evicted blocks go, and come back from. HostTier is one; Tiers are several that look like one."""

from collections.abc import Sequence
from typing import Any, Protocol

from .prefix_cache import BlockHash


class Tier(Protocol):
    """All that BlockManager knows of a second tier. A block of a tier is a value that only the tier understands."""

    def __contains__(self, block_hash: BlockHash) -> bool:
        """Return whether the tier has a block with this hash."""

    def store(self, block: int, block_hash: BlockHash) -> None:
        """Keep a copy of a device block that is about to be reused, if there is room."""

    def hold(self, hashes: list[BlockHash]) -> list[Any]:
        """Return the blocks with these hashes. They are not evicted until they are loaded or released."""

    def release(self, held: list[Any]) -> None:
        """Undo hold()."""

    def load(self, held: list[Any], targets: list[int]) -> None:
        """Start to copy held blocks to blocks of the device. If this raises, nothing moves, and they are still held."""

    def cancel(self, targets: list[int]) -> None:
        """Forget the loads to these device blocks once nothing moves any more. What they load from is still held."""

    def has_arrived(self, blocks: list[int]) -> bool:
        """Return whether none of these device blocks is on its way."""

    def collect(self, wait: bool = False) -> list[int]:
        """Release what has been loaded, and return the device blocks that have arrived. `wait` for all of them."""

    def arriving(self) -> list[int]:
        """Return the device blocks that collect() has not returned yet."""

    def reset(self) -> None:
        """Forget all blocks. None may be on its way."""

    def check_integrity(self) -> None:
        """Assert that exactly the blocks that are being loaded are held."""


class Tiers:
    """Several tiers as one. A block is stored in each of them, and loaded from the first that has it."""

    def __init__(self, tiers: Sequence[Tier]) -> None:
        self._tiers = tiers

    def __contains__(self, block_hash: BlockHash) -> bool:
        return any(block_hash in tier for tier in self._tiers)

    def store(self, block: int, block_hash: BlockHash) -> None:
        for tier in self._tiers:
            tier.store(block, block_hash)

    def hold(self, hashes: list[BlockHash]) -> list[tuple[Tier, Any]]:
        held: list[tuple[Tier, Any]] = []
        for block_hash in hashes:
            tier = next(tier for tier in self._tiers if block_hash in tier)
            held += [(tier, block) for block in tier.hold([block_hash])]
        return held

    def release(self, held: list[tuple[Tier, Any]]) -> None:
        for tier, block in held:
            tier.release([block])

    def load(self, held: list[tuple[Tier, Any]], targets: list[int]) -> None:
        begun: list[tuple[Tier, list[int]]] = []
        try:
            for tier in self._tiers:
                own = [(block, target) for (owner, block), target in zip(held, targets, strict=True) if owner is tier]
                if own:
                    tier.load([block for block, _ in own], [target for _, target in own])
                    begun.append((tier, [target for _, target in own]))
        except Exception:
            for tier, own_targets in begun:
                tier.cancel(own_targets)
            raise

    def cancel(self, targets: list[int]) -> None:
        for tier in self._tiers:
            tier.cancel(targets)

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
