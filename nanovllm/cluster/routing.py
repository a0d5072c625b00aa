"""PrefixRouter: sends requests with the same prefix to the same replica, whose cache has the blocks of the prefix.

A table maps the hash of each block of a prompt (see ../engine/prefix_cache.py) to the replicas that received the block:

    the cat sat on -> a, b        a new prompt "the cat sat on | the mat and ate | ..." matches two blocks of a,
    the mat and ate -> a          so a gets it. If a is much busier than the others, b gets it, since b has one block

SGLang's router keeps such a table as a tree of texts, and vLLM's production stack keeps one as a trie of hashed chunks.
Neither asks the replicas which blocks they still have. The limits on imbalance, a difference and a ratio, come from
SGLang. The idea that a hot prefix gets a second replica, once the load of the first one outweighs the savings from its
cache, comes from Preble (Srivatsa et al. 2024, arXiv:2407.00023).
"""

from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from typing import Generic, Protocol, TypeVar

from ..engine.prefix_cache import BlockHash

Replica = TypeVar("Replica")  # any hashable name


class Router(Protocol[Replica]):
    """A policy that chooses a replica for each request."""

    def choose(self, hashes: Sequence[BlockHash], loads: Mapping[Replica, int]) -> Replica:
        """Return a replica for a prompt with these block hashes.

        `loads` has the number of unfinished requests of each live replica, and at least one replica.
        """
        ...


class PrefixRouter(Generic[Replica]):
    """A Router that remembers which replicas have served each prefix."""

    def __init__(
        self, min_share: float = 0.1, max_lead: int = 4, max_ratio: float = 1.5, max_blocks: int = 1 << 20
    ) -> None:
        """Create an empty table of at most `max_blocks` hashes; the least recently used ones are forgotten.

        A prefix counts only if it is at least `min_share` of a prompt's blocks. Its replica may have `max_ratio` times
        as many unfinished requests as the least busy one, plus `max_lead`.
        """
        self._min_share, self._max_lead, self._max_ratio, self._max_blocks = min_share, max_lead, max_ratio, max_blocks
        self._table: OrderedDict[BlockHash, dict[Replica, None]] = OrderedDict()
        self._num_blocks: Counter[Replica] = Counter()  # by replica, how many hashes of the table list it

    def choose(self, hashes: Sequence[BlockHash], loads: Mapping[Replica, int]) -> Replica:
        """Return a replica for a prompt with these block hashes, and record that the replica now has these blocks.

        If every matching replica is above the limit, choose the least busy replica. Ties go to the replica with the
        fewest blocks, so that prefixes spread even under a light load.

        >>> router, idle = PrefixRouter(), {"a": 0, "b": 0}
        >>> router.choose([b"1", b"2"], {"a": 1, "b": 0}), router.choose([b"1", b"3"], {"a": 0, "b": 1})
        ('b', 'b')
        >>> router.choose([b"1", b"4"], {"a": 0, "b": 9}), router.choose([b"5"], {"a": 0, "b": 9})
        ('a', 'a')
        """
        limit = min(loads.values()) * self._max_ratio + self._max_lead
        candidates = [replica for replica, load in loads.items() if load <= limit]
        for depth, block_hash in enumerate(hashes, start=1):  # with each block, fewer replicas match
            holders = [replica for replica in self._table.get(block_hash, ()) if replica in candidates]
            if not holders:
                break
            if depth >= self._min_share * len(hashes):
                candidates = holders
        chosen = min(candidates, key=lambda replica: (loads[replica], self._num_blocks[replica]))
        self._record(hashes, chosen)
        return chosen

    def _record(self, hashes: Sequence[BlockHash], replica: Replica) -> None:
        for block_hash in reversed(hashes):  # so that a prompt's last block is forgotten first
            holders = self._table.setdefault(block_hash, {})
            if replica not in holders:
                holders[replica] = None
                self._num_blocks[replica] += 1
            self._table.move_to_end(block_hash)
        while len(self._table) > self._max_blocks:
            _, holders = self._table.popitem(last=False)
            self._num_blocks.subtract([*holders])


class LeastQueue(Generic[Replica]):
    """A Router that chooses the least busy replica, without a table of prefixes."""

    def choose(self, hashes: Sequence[BlockHash], loads: Mapping[Replica, int]) -> Replica:
        """Return the first replica in `loads` with the fewest unfinished requests."""
        return min(loads, key=loads.__getitem__)


class RoundRobin(Generic[Replica]):
    """A Router that chooses the replicas in turn."""

    def __init__(self) -> None:
        self._turn = 0

    def choose(self, hashes: Sequence[BlockHash], loads: Mapping[Replica, int]) -> Replica:
        """Return the replica that follows the last choice in `loads`."""
        self._turn += 1
        return list(loads)[self._turn % len(loads)]
