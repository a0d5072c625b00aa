"""BlockPool: which blocks are free, how many tables hold each of the others, and which text each block caches."""

from collections import Counter, OrderedDict
from collections.abc import Callable
from itertools import islice

from .observer import Observer
from .prefix_cache import BlockHash


class NoFreeBlocks(RuntimeError):
    """A request for more blocks than are free."""


class BlockPool:
    """Blocks 0 .. num_blocks - 1, and the free queue: those that no sequence holds.

        front [3][0][7] ... [5] | [2][9][4] back      get_new_blocks() takes from the front
              not cached        | cached              free_blocks() puts cached blocks at the back, others in front

    So a cached block keeps its text until all others are taken, and then the least recently used one is evicted first.
    """

    def __init__(
        self, num_blocks: int, observer: Observer, on_evict: Callable[[int, BlockHash], None] | None = None
    ) -> None:
        """Start with all blocks free. `on_evict` gets a block and its text before the block is used for another one."""
        self.num_blocks = num_blocks
        self.free = OrderedDict.fromkeys(range(num_blocks))  # a queue that a block can leave from the middle
        self.ref_counts = [0] * num_blocks  # how many block tables and loads hold each block
        self.cached: dict[BlockHash, int] = {}  # the block of each cached text
        self.hashes: dict[int, BlockHash] = {}  # the text of each cached block
        self._observer = observer
        self._on_evict = on_evict

    def get_new_blocks(self, count: int) -> list[int]:
        """Take `count` free blocks, and forget their texts. Each has one holder then.

        Raise NoFreeBlocks ("4 blocks are needed, 3 are free"), or the error of on_evict, and take none.
        """
        if count > len(self.free):
            raise NoFreeBlocks(f"{count} blocks are needed, {len(self.free)} are free")
        blocks = list(islice(self.free, count))
        for block in blocks:
            if block in self.hashes:
                if self._on_evict:
                    self._on_evict(block, self.hashes[block])  # first: if it raises, the text stays in the cache
                self._forget(block, "taken")
        for block in blocks:
            del self.free[block]
            self.ref_counts[block] = 1
        return blocks

    def touch(self, blocks: list[int]) -> None:
        """Add a holder to each of `blocks`, which are held or cached."""
        for block in blocks:
            assert self.ref_counts[block] > 0 or block in self.hashes, f"block {block} is neither held nor cached"
            self.ref_counts[block] += 1
            self.free.pop(block, None)

    def free_blocks(self, blocks: list[int]) -> None:
        """Remove a holder from each of `blocks`. Those without holders are free, and the first one is taken next.

        Of cached blocks the first is taken last: a text is of no use without its beginning.
        """
        for block in reversed(blocks):
            assert self.ref_counts[block] > 0, f"block {block} is freed, and no table holds it"
            self.ref_counts[block] -= 1
            if self.ref_counts[block] == 0:
                self.free[block] = None
                self.free.move_to_end(block, last=block in self.hashes)

    def cache_block(self, block: int, block_hash: BlockHash) -> None:
        """Let a full block be found by its hash. If another one has this text, that one stays, and nothing changes."""
        if block_hash not in self.cached:
            self.cached[block_hash], self.hashes[block] = block, block_hash
            self._observer.tell("cache", block, block_hash)

    def reset_prefix_cache(self) -> None:
        """Empty the cache. The free blocks keep their order."""
        for block in list(self.hashes):
            self._forget(block, "reset")

    def _forget(self, block: int, why: str) -> None:
        """Remove the text of a block from the cache."""
        block_hash = self.hashes.pop(block)
        del self.cached[block_hash]
        self._observer.tell("evict", block, block_hash, why)

    def check_integrity(self, held: list[int]) -> None:
        """Raise AssertionError unless the counts are right for `held`, all block tables end to end; 0 means free."""
        holders = Counter(held)
        counted = [holders[block] for block in range(self.num_blocks)]
        assert self.ref_counts == counted, f"reference counts are {self.ref_counts}, the tables hold {counted}"
        free = [block for block in range(self.num_blocks) if not holders[block]]
        assert sorted(self.free) == free, f"free blocks are {sorted(self.free)}, blocks in no table are {free}"
        assert {text: block for block, text in self.hashes.items()} == self.cached, "a text and its block disagree"
        is_cached = [block in self.hashes for block in self.free]
        assert is_cached == sorted(is_cached), f"a cached block is in front of one that is not: {list(self.free)}"
