"""BlockPool: how many hold each block, and which are free or idle. It knows nothing of sequences."""

from collections import Counter

from .prefix_cache import CachedBlocks


class NoFreeBlocks(RuntimeError):
    """Fewer blocks are free than are needed."""


class BlockPool:
    """Blocks 0 .. num_blocks - 1, how many hold each, and the list of those that are free. O(1) a block.

    Last in, first out: the block taken next is the one given back last, which may still be in the processor's caches.
    A cached block that nobody holds is idle: it is taken only when no other is left, and may be held again before.
    """

    def __init__(self, num_blocks: int, cached: CachedBlocks) -> None:
        self.num_blocks = num_blocks
        self._cached = cached
        self._free = list(range(num_blocks - 1, -1, -1))  # taken from the end: block 0 first
        self._ref_counts = [0] * num_blocks  # 0 for a block that is free

    @property
    def num_free(self) -> int:
        """Those that take() can give, idle ones too."""
        return len(self._free) + self._cached.num_idle

    def take(self, count: int) -> list[int]:
        """Blocks that have from now on one holder, the one given back last comes first.

        Raises NoFreeBlocks, with both numbers, and takes none, if fewer than `count` are free.
        """
        if count > self.num_free:
            raise NoFreeBlocks(f"{count} blocks are needed, {self.num_free} are free")
        start = max(0, len(self._free) - count)
        blocks = self._free[start:]
        del self._free[start:]
        blocks.reverse()
        blocks += [self._cached.evict() for _ in range(count - len(blocks))]
        for block in blocks:
            self._ref_counts[block] = 1
        return blocks

    def share(self, blocks: list[int]) -> None:
        """Each has one holder more.

        Raises ValueError, which names the block, and changes nothing, if one of them is free and not idle.
        """
        free = [block for block in blocks if not self._ref_counts[block] and block not in self._cached]
        if free:
            raise ValueError(f"block {free[0]} is shared, and nobody holds it")
        for block in blocks:
            self._cached.set_busy(block)
            self._ref_counts[block] += 1

    def give_back(self, blocks: list[int]) -> None:
        """Each has one holder less. Of those that have none any more the first will be the next one taken.

        Cached ones become idle, the last of them first: so the end of a text is evicted before its beginning.
        Raises ValueError, which names the block, and gives none back, if there are more of it than it has holders.
        """
        counts, freed = self._ref_counts, []
        for i, block in enumerate(blocks):
            if not counts[block]:
                for given in blocks[:i]:
                    counts[given] += 1
                raise ValueError(f"block {block} is given back twice")
            counts[block] -= 1
            if not counts[block]:
                freed.append(block)
        for block in reversed(freed):
            if block in self._cached:
                self._cached.set_idle(block)
            else:
                self._free.append(block)

    def forget_all(self) -> None:
        """Nothing is cached any more: what was idle is free."""
        self._free += self._cached.clear()

    def ref_count(self, block: int) -> int:
        """How many hold it."""
        return self._ref_counts[block]

    def check_integrity(self, tables: list[int]) -> None:
        """A block has as many holders as there are tables that name it; those that have none are free or idle.

        `tables`: all block tables end to end.
        """
        holders = Counter(tables)
        counted = [holders[block] for block in range(self.num_blocks)]
        assert self._ref_counts == counted, f"reference counts {self._ref_counts}, in the tables {counted}"
        unheld = [block for block in range(self.num_blocks) if not holders[block]]
        places = sorted([*self._free, *self._cached.check_integrity()])
        assert places == unheld, f"free or idle are {places}, in no table are {unheld}"
        assert not [block for block in self._free if block in self._cached], "a free block is cached"
