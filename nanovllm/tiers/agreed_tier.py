"""AgreedTier: a block has arrived when every rank has it, and is lost when one rank has lost its part."""

from ..distributed.rank_group import RankGroup
from ..engine.kv_cache import BlockCopy
from ..engine.prefix_cache import BlockHash
from ..engine.tier import Tier

ON_ITS_WAY, LOST, ARRIVED = 0, 1, 2  # ranks agree on the minimum


class AgreedTier:
    """A Tier around another one. Every rank has one, with its own part of each block, and makes the same calls.

    has_arrived() and arriving() return what the ranks last agreed on: at the first call after collect(), or in
    collect(wait=True). The tier itself may be ahead, because each rank collects its loads as soon as they arrive.
    """

    def __init__(self, tier: Tier, ranks: RankGroup) -> None:
        self._tier, self._ranks = tier, ranks
        self._here: dict[int, int] = {}  # this rank's state of each target that collect() has not returned yet
        self._agreed: dict[int, int] = {}  # the state that all ranks last agreed on
        self._is_current = True

    def __contains__(self, block_hash: BlockHash) -> bool:
        return block_hash in self._tier

    def save(self, block: int, block_hash: BlockHash, is_prompt: bool) -> None:
        """Keep this rank's part of a computed block."""
        self._tier.save(block, block_hash, is_prompt)

    def touch(self, hashes: list[BlockHash]) -> None:
        """Note that these blocks were used."""
        self._tier.touch(hashes)

    def store(self, block: int, block_hash: BlockHash) -> None:
        """Keep this rank's part of an evicted block."""
        self._tier.store(block, block_hash)

    def hold(self, hashes: list[BlockHash]) -> list[int]:
        """Hold this rank's blocks."""
        return self._tier.hold(hashes)

    def release(self, held: list[int]) -> None:
        """Let held blocks be evicted again."""
        self._tier.release(held)

    def load(self, copies: list[BlockCopy]) -> None:
        """Start this rank's load."""
        self._tier.load(copies)
        self._here |= {copy.target: ON_ITS_WAY for copy in copies}
        self._agreed |= {copy.target: ON_ITS_WAY for copy in copies}

    def has_arrived(self, blocks: list[int]) -> bool:
        """Return True unless one of these blocks has not arrived on some rank."""
        if self._here and not self._is_current:
            self._agree()
        return all(self._agreed.get(block, ARRIVED) == ARRIVED for block in blocks)

    def collect(self, wait: bool = False) -> tuple[list[int], list[int]]:
        """Return the targets that have arrived on all ranks, and the lost ones. With `wait`, wait for all loads."""
        if wait and self._here:
            self._agree(wait=True)
        elif not self._here:
            self._tier.collect()  # it may have other news
        arrived, lost = ([block for block, state in self._agreed.items() if state == end] for end in (ARRIVED, LOST))
        for block in arrived + lost:
            del self._here[block], self._agreed[block]
        self._is_current = False
        return arrived, lost

    def _agree(self, wait: bool = False) -> None:
        arrived, lost = self._tier.collect(wait)
        self._here |= dict.fromkeys(arrived, ARRIVED) | dict.fromkeys(lost, LOST)
        self._agreed = dict(zip(self._here, self._ranks.minimum([*self._here.values()]), strict=True))
        self._is_current = True

    def arriving(self) -> list[int]:
        """Return the targets that collect() has not returned yet."""
        return [*self._here]

    def reset(self) -> None:
        """Empty the tier."""
        self._tier.reset()

    def check_integrity(self) -> None:
        """Raise AssertionError unless the tier is whole, and nothing is on its way that is not known."""
        self._tier.check_integrity()
        assert {*self._tier.arriving()} <= {*self._here}, "a block arrives that was never loaded"
