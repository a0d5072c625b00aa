r"""PrefixCache: which blocks hold which beginnings of texts, and in which order they are given up.

    the cat sat on (block 7) --- the mat and ate (block 2)      block size 4: a text is found block by block, each by
                             \-- a warm stone by (block 5)      the hash of its tokens and of all before them

Keys and values of a token depend on all tokens before it, so equal tokens after different prefixes are different
blocks. Only full blocks, and only computed ones, are here; they are never written again. One that nobody holds stays
until its room is needed: vLLM's automatic prefix caching (2024); as a tree, RadixAttention (Zheng et al. 2023,
arXiv:2312.07104).
"""

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

Hash = bytes


def hash_block(parent: Hash, token_ids: list[int]) -> Hash:
    """The hash of a block's tokens and all before them, of which `parent` is the hash: b"" if there are none.

    >>> hash_block(b"", [1, 2]) == hash_block(b"", [1, 2])
    True
    >>> hash_block(hash_block(b"", [9]), [1, 2]) == hash_block(b"", [1, 2])
    False
    """
    return hashlib.blake2b(parent + array("q", token_ids).tobytes(), digest_size=16).digest()


@dataclass(frozen=True, eq=False)
class CachedBlock:
    """A full block whose keys and values are computed. Its text is its own tokens after those of `parent`."""

    hash: Hash
    parent: "CachedBlock | None"
    token_ids: list[int]  # [block_size]
    places: "dict[CachedBlocks, int]" = field(default_factory=dict)  # its block in each pool that has it


class CachedBlocks:
    """Which blocks of a pool are cached, and in which order they are evicted. Each operation takes O(1)."""

    def __init__(self, index: dict[Hash, CachedBlock]) -> None:
        """What is forgotten here, and is in no other pool, leaves the `index`."""
        self.on_evict: Callable[[CachedBlock], None] | None = None  # called while the block is still what it was
        self._index = index
        self._cached: dict[int, CachedBlock] = {}  # by the number of the block
        self._idle: OrderedDict[int, None] = OrderedDict()  # those that nobody holds, the least recently used first

    @property
    def num_idle(self) -> int:
        return len(self._idle)

    def __contains__(self, block: int) -> bool:
        return block in self._cached

    def add(self, cached: CachedBlock, block: int) -> None:
        """Its keys and values are in this block, too."""
        self._cached[block] = cached
        cached.places[self] = block

    def forget(self, block: int) -> None:
        """Its keys and values will be others': it is found no more, nor idle. Nothing happens if it is not cached."""
        cached = self._cached.pop(block, None)
        if cached:
            self._idle.pop(block, None)
            del cached.places[self]
            if not cached.places:
                del self._index[cached.hash]

    def set_idle(self, block: int) -> None:
        """Nobody holds it any more: it is the most recently used of those that may be evicted."""
        self._idle[block] = None

    def set_busy(self, block: int) -> None:
        """Somebody holds it: it is not evicted."""
        self._idle.pop(block, None)

    def evict(self) -> int:
        """Forget the block that has been idle longest, and return it."""
        block = next(iter(self._idle))
        if self.on_evict:
            self.on_evict(self._cached[block])
        self.forget(block)
        return block

    def clear(self) -> list[int]:
        """Forget everything. Returns the blocks that were idle."""
        idle = list(self._idle)
        for block in list(self._cached):
            self.forget(block)
        return idle

    def check_integrity(self) -> list[int]:
        """Index and blocks name the same, and whoever is idle is among them. Returns the idle blocks."""
        here = {key: cached for key, cached in self._index.items() if self in cached.places}
        assert {cached.hash: cached for cached in self._cached.values()} == here, "the index has others"
        assert all(cached.places[self] == block for block, cached in self._cached.items()), "a text is elsewhere"
        assert all(cached.places for cached in self._index.values()), "a text is nowhere"
        assert self._idle.keys() <= self._cached.keys(), "an idle block is not cached"
        return list(self._idle)


@dataclass
class PrefixCacheStats:
    """In tokens, of all admissions since the start or the last reset."""

    queried: int = 0
    hit: int = 0
    restored: int = 0  # among those that were hit: what was on the host only


class PrefixCache:
    """The index of computed texts, wherever they are. Each operation takes O(1) a block."""

    def __init__(self, block_size: int, hash_function: Callable[[Hash, list[int]], Hash] = hash_block) -> None:
        self.stats = PrefixCacheStats()
        self._block_size = block_size
        self._hash = hash_function
        self._index: dict[Hash, CachedBlock] = {}
        self.blocks, self.host_blocks = CachedBlocks(self._index), CachedBlocks(self._index)

    def extend_hashes(self, hashes: list[Hash], token_ids: list[int], num_blocks: int) -> None:
        """So that `hashes`, the chain of a text's full blocks as far as it is known, has num_blocks links.

        They are made by the cache's hash function. What is known stays, also if it is longer.
        """
        for i in range(len(hashes), num_blocks):
            tokens = token_ids[i * self._block_size : (i + 1) * self._block_size]
            hashes.append(self._hash(hashes[-1] if hashes else b"", tokens))

    def match(self, hashes: list[Hash], token_ids: list[int]) -> list[CachedBlock]:
        """The longest beginning of a text that is cached, in whole blocks.

        A hash only says where to look: a block is the one looked for if its tokens are, and its parent is the block
        that was found before it.
        """
        found: list[CachedBlock] = []
        for i, block_hash in enumerate(hashes):
            cached, parent = self._index.get(block_hash), found[-1] if found else None
            tokens = token_ids[i * self._block_size : (i + 1) * self._block_size]
            if cached is None or cached.parent is not parent or cached.token_ids != tokens:
                break
            found.append(cached)
        return found

    def insert(self, block_hash: Hash, parent: CachedBlock | None, token_ids: list[int], block: int) -> CachedBlock:
        """`block` has these tokens, computed. Returns the cached block of this text.

        If there is one on the device, it stays, and `block` is not cached; nor is it if its hash is another text's. The
        answer is of this text in any case: who goes on from here must not become a child of the other.
        """
        new = CachedBlock(block_hash, parent, token_ids)
        cached = self._index.setdefault(block_hash, new)
        if cached.parent is not parent or cached.token_ids != token_ids:
            return new
        if self.blocks not in cached.places:
            self.blocks.add(cached, block)
        return cached
