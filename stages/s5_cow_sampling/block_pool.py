"""BlockPool: how many hold each block, and which are free. It knows nothing of sequences."""

from collections import Counter


class NoFreeBlocks(RuntimeError):
    """Fewer blocks are free than are needed."""


class BlockPool:
    """Blocks 0 .. num_blocks - 1, how many hold each, and the list of those that are free. O(1) a block.

    Last in, first out: the block taken next is the one given back last, which may still be in the processor's caches.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))  # taken from the end: block 0 first
        self._ref_counts = [0] * num_blocks  # 0 for a block that is free

    @property
    def num_free_blocks(self) -> int:
        return len(self._free)

    def get_new_blocks(self, count: int) -> list[int]:
        """Blocks that have from now on one holder, the one given back last comes first.

        Raises NoFreeBlocks, with both numbers, and takes none, if fewer than `count` are free.
        """
        start = len(self._free) - count
        if start < 0:
            raise NoFreeBlocks(f"{count} blocks are needed, {len(self._free)} are free")
        blocks = self._free[start:]
        del self._free[start:]
        blocks.reverse()
        for block in blocks:
            self._ref_counts[block] = 1
        return blocks

    def touch(self, blocks: list[int]) -> None:
        """Each has one holder more.

        Raises ValueError, which names the block, and changes nothing, if one of them has none.
        """
        free = [block for block in blocks if not self._ref_counts[block]]
        if free:
            raise ValueError(f"block {free[0]} is shared, and nobody holds it")
        for block in blocks:
            self._ref_counts[block] += 1

    def free_blocks(self, blocks: list[int]) -> None:
        """Each has one holder less. Of those that have none any more the first will be the next one taken.

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
        self._free += reversed(freed)

    def ref_count(self, block: int) -> int:
        """How many hold it."""
        return self._ref_counts[block]

    def check_integrity(self, tables: list[int]) -> None:
        """A block has as many holders as there are tables that name it; those that have none are the free list.

        `tables`: all block tables end to end.
        """
        holders = Counter(tables)
        counted = [holders[block] for block in range(self.num_blocks)]
        assert self._ref_counts == counted, f"reference counts {self._ref_counts}, in the tables {counted}"
        free = [block for block in range(self.num_blocks) if not holders[block]]
        assert sorted(self._free) == free, f"the free list has {sorted(self._free)}, in no table are {free}"
