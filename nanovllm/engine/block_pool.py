"""BlockPool: how many tables hold each block, which blocks are free, and which are cached. It knows no sequences."""

from collections import Counter, OrderedDict
from collections.abc import Callable
from itertools import islice

from .prefix_cache import BlockHash


class NoFreeBlocks(RuntimeError):
    """Fewer blocks are free than are needed."""


class BlockPool:
    """Blocks 0 .. num_blocks - 1 and a queue of the free ones. Each operation takes O(1) per block.

        front [3][0][7] ... [5] | [2][9][4] back      get_new_blocks() takes blocks from the front
              not cached        | cached              free_blocks() puts a cached block at the back, others in front

    So a cached block survives until all others are taken, and then the least recently used one is evicted first.
    """

    def __init__(self, num_blocks: int, on_evict: Callable[[int, BlockHash], None] | None = None) -> None:
        """Start with all blocks free. `on_evict` gets each cached block and its hash before the block is reused."""
        self.num_blocks = num_blocks
        self.ref_counts = [0] * num_blocks  # how many block tables hold each block
        self.free = OrderedDict.fromkeys(range(num_blocks))  # the queue, as keys
        self.cached: dict[BlockHash, int] = {}  # the index: from hash to block
        self.hashes: dict[int, BlockHash] = {}  # the same from block to hash
        self._on_evict = on_evict

    @property
    def num_free_blocks(self) -> int:
        return len(self.free)

    def get_new_blocks(self, count: int) -> list[int]:
        """Take `count` blocks from the front of the queue. A cached one is evicted from the index.

        Raise NoFreeBlocks ("4 blocks are needed, 3 are free"), and take none, if there are too few.
        """
        if count > len(self.free):
            raise NoFreeBlocks(f"{count} blocks are needed, {len(self.free)} are free")
        blocks = list(islice(self.free, count))
        for block in blocks:  # one by one, and before any block is taken: on_evict may raise
            if block in self.hashes:
                if self._on_evict:
                    self._on_evict(block, self.hashes[block])
                del self.cached[self.hashes.pop(block)]
        for block in blocks:
            del self.free[block]
            self.ref_counts[block] = 1
        return blocks

    def touch(self, blocks: list[int]) -> None:
        """Add one holder to each of `blocks`, which are held or cached. A free one leaves the queue."""
        for block in blocks:
            assert self.ref_counts[block] > 0 or block in self.hashes, f"block {block} is neither held nor cached"
            self.free.pop(block, None)
            self.ref_counts[block] += 1

    def free_blocks(self, blocks: list[int]) -> None:
        """Remove one holder from each of `blocks`. A block without holders returns to the queue.

        The last block goes first, so the first one is the next to be taken; but if they are cached, the first one is
        the last to be evicted: a text is useless without its beginning. Raise ValueError ("block 3 is freed twice"),
        and change nothing, if `blocks` names a block more often than it is held.
        """
        for block, count in Counter(blocks).items():
            if count > self.ref_counts[block]:
                raise ValueError(f"block {block} is freed twice")
        for block in reversed(blocks):
            self.ref_counts[block] -= 1
            if self.ref_counts[block] == 0:
                self.free[block] = None
                if block not in self.hashes:
                    self.free.move_to_end(block, last=False)

    def cache_block(self, block: int, block_hash: BlockHash) -> bool:
        """Add `block` to the index. Return False, and change nothing, if another block with this hash is in it."""
        if block_hash in self.cached:
            return False
        self.cached[block_hash], self.hashes[block] = block, block_hash
        return True

    def reset_prefix_cache(self) -> None:
        """Empty the index. The free blocks keep their order."""
        self.cached.clear()
        self.hashes.clear()

    def check_integrity(self, held: list[int]) -> None:
        """Assert that the counts match `held`, all block tables end to end, and that all other blocks are free."""
        holders = Counter(held)
        counted = [holders[block] for block in range(self.num_blocks)]
        assert self.ref_counts == counted, f"reference counts are {self.ref_counts}, the tables say {counted}"
        free = [block for block in range(self.num_blocks) if not holders[block]]
        assert sorted(self.free) == free, f"the queue has {sorted(self.free)}, no table has {free}"
        assert {text: block for block, text in self.hashes.items()} == self.cached, "the two indexes differ"
        is_cached = [block in self.hashes for block in self.free]
        assert is_cached == sorted(is_cached), f"a cached block stands before an uncached one: {list(self.free)}"
