"""BlockPool: which blocks are free, how many holders the other blocks have, and which blocks are cached."""

from collections import Counter, OrderedDict

from .observer import Observer
from .prefix_cache import BlockHash


class BlockPool:
    """Blocks 0 .. num_blocks - 1, and the free queue: the blocks that nothing holds.

        front [3][0][7] ... [5] | [2][9][4] back      get_new_blocks() takes from the front
              not cached        | cached              free_blocks() puts cached blocks at the back, others at the front

    So uncached blocks are taken first, then cached ones, the least recently used first.
    """

    def __init__(self, num_blocks: int, observer: Observer) -> None:
        self.num_blocks = num_blocks
        self.free = OrderedDict.fromkeys(range(num_blocks))  # a queue that a block can leave from the middle
        self.ref_counts = [0] * num_blocks  # how many block tables hold each block
        self.cached: dict[BlockHash, int] = {}  # the index: hash -> block
        self.hashes: dict[int, BlockHash] = {}  # cached block -> hash
        self._observer = observer

    def get_new_blocks(self, count: int) -> list[int]:
        """Take `count` free blocks, and return them with one holder each. There must be as many.

        Cached ones are evicted: they leave the index. Tell the observer "evict", with the reason "taken".
        """
        assert count <= len(self.free), f"blocks needed: {count}, free: {len(self.free)}"
        blocks = [self.free.popitem(last=False)[0] for _ in range(count)]
        for block in blocks:
            self.ref_counts[block] = 1
            if block in self.hashes:
                block_hash = self.hashes.pop(block)
                del self.cached[block_hash]
                self._observer.tell("evict", block, block_hash, "taken")
        return blocks

    def touch(self, blocks: list[int]) -> None:
        """Add a holder to each of `blocks`, which must be held or cached, and take them off the free queue."""
        for block in blocks:
            assert self.ref_counts[block] > 0 or block in self.hashes, f"block {block} is neither held nor cached"
            self.ref_counts[block] += 1
            self.free.pop(block, None)

    def free_blocks(self, blocks: list[int]) -> None:
        """Remove a holder from each of `blocks`. A block without holders is free, and the first one is taken next.

        Cached blocks go to the back of the queue. Among these, the first one is taken last, because no request can hit
        the later blocks without it.
        """
        for block in reversed(blocks):
            assert self.ref_counts[block] > 0, f"block {block} is freed, and no table holds it"
            self.ref_counts[block] -= 1
            if self.ref_counts[block] == 0:
                self.free[block] = None
                self.free.move_to_end(block, last=block in self.hashes)

    def cache_block(self, block: int, block_hash: BlockHash) -> None:
        """Add a full block to the index, and tell the observer "cache". Do nothing if the hash is already cached."""
        if block_hash not in self.cached:
            self.cached[block_hash], self.hashes[block] = block, block_hash
            self._observer.tell("cache", block, block_hash)

    def check_integrity(self, held: list[int]) -> None:
        """Raise AssertionError unless `held`, the blocks of all holders, matches ref_counts, and the rest is free."""
        holders = Counter(held)
        counted = [holders[block] for block in range(self.num_blocks)]
        assert self.ref_counts == counted, f"reference counts are {self.ref_counts}, the tables hold {counted}"
        free = [block for block in range(self.num_blocks) if not holders[block]]
        assert sorted(self.free) == free, f"free blocks are {sorted(self.free)}, blocks in no table are {free}"
        assert {each: block for block, each in self.hashes.items()} == self.cached, "`hashes` and `cached` disagree"
        is_cached = [block in self.hashes for block in self.free]
        assert is_cached == sorted(is_cached), f"a cached block is in front of one that is not: {list(self.free)}"
