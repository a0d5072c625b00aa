"""AgreedTier: a block has arrived when it has arrived on every rank, and is lost when any rank has lost its part."""

from ..distributed.rank_group import RankGroup
from ..engine.kv_cache import BlockCopy
from ..engine.prefix_cache import BlockHash
from ..engine.tier import Tier

ON_ITS_WAY, LOST, ARRIVED = 0, 1, 2  # the ranks agree on the minimum of their states


class AgreedTier:
    """A wrapper around a rank's tier, which has this rank's part of each block. All ranks make the same calls.

    The ranks agree in the first has_arrived() after each collect(), and in collect(wait=True). In between,
    has_arrived(), arriving() and collect() report what the ranks last agreed on. The wrapped tier may be ahead: it
    forgets a load that has arrived on its own rank.
    """

    def __init__(self, tier: Tier, ranks: RankGroup) -> None:
        self._tier, self._ranks = tier, ranks
        self._local: dict[int, int] = {}  # this rank's state of each target, until collect() returns it
        self._agreed: dict[int, int] = {}  # the states that all ranks last agreed on
        self._is_current = True  # False if the ranks have not agreed since the last collect()

    def __contains__(self, block_hash: BlockHash) -> bool:
        return block_hash in self._tier

    def save(self, block: int, block_hash: BlockHash, is_prompt: bool) -> None:
        """Keep this rank's part of a computed block."""
        self._tier.save(block, block_hash, is_prompt)

    def touch(self, hashes: list[BlockHash]) -> None:
        """Record that these blocks were used."""
        self._tier.touch(hashes)

    def store(self, block: int, block_hash: BlockHash) -> None:
        """Keep this rank's part of an evicted block."""
        self._tier.store(block, block_hash)

    def hold(self, hashes: list[BlockHash]) -> list[int]:
        """Hold this rank's parts of these blocks."""
        return self._tier.hold(hashes)

    def release(self, held: list[int]) -> None:
        """Let held blocks be evicted again."""
        self._tier.release(held)

    def load(self, copies: list[BlockCopy]) -> None:
        """Start loading this rank's parts of these blocks."""
        self._tier.load(copies)
        self._local |= {copy.target: ON_ITS_WAY for copy in copies}
        self._agreed |= {copy.target: ON_ITS_WAY for copy in copies}

    def has_arrived(self, blocks: list[int]) -> bool:
        """Return True unless some rank is still loading one of these blocks, or has lost it."""
        if self._local and not self._is_current:
            self._agree()
        return all(self._agreed.get(block, ARRIVED) == ARRIVED for block in blocks)

    def collect(self, wait: bool = False) -> tuple[list[int], list[int]]:
        """Return the targets that have arrived on all ranks, and the lost ones. With `wait`, wait for all loads."""
        if wait and self._local:
            self._agree(wait=True)
        elif not self._local:
            self._tier.collect()  # the tier may have other events to report
        arrived, lost = ([block for block, state in self._agreed.items() if state == each] for each in (ARRIVED, LOST))
        for block in arrived + lost:
            del self._local[block], self._agreed[block]
        self._is_current = False
        return arrived, lost

    def _agree(self, wait: bool = False) -> None:
        arrived, lost = self._tier.collect(wait)
        self._local |= dict.fromkeys(arrived, ARRIVED) | dict.fromkeys(lost, LOST)
        self._agreed = dict(zip(self._local, self._ranks.minimum([*self._local.values()]), strict=True))
        self._is_current = True

    def arriving(self) -> list[int]:
        """Return the targets that collect() has not returned yet."""
        return [*self._local]

    def reset(self) -> None:
        """Empty the tier."""
        self._tier.reset()

    def check_integrity(self) -> None:
        """Raise AssertionError unless the tier is consistent, and all of its loads were started here."""
        self._tier.check_integrity()
        assert {*self._tier.arriving()} <= {*self._local}, "a block arrives that was never loaded"
