"""BlockPool: how many hold each block, and which blocks are free. It knows nothing of sequences."""

from collections import Counter, OrderedDict


class NoFreeBlocks(RuntimeError):
    """Fewer blocks are free than are needed."""


class BlockPool:
    """Blocks 0 .. num_blocks - 1, and the queue of the free ones. Each operation takes O(1) a block.

        front [3][0][7] ... [5] back      get_new_blocks() takes from the front, free_blocks() returns to the front

    So the block taken next is the one returned last: it may still be in the processor's caches.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.ref_counts = [0] * num_blocks  # how many tables hold each block
        self._free = OrderedDict.fromkeys(range(num_blocks))  # a queue that also answers "is this block in it?"

    @property
    def num_free_blocks(self) -> int:
        return len(self._free)

    def get_new_blocks(self, count: int) -> list[int]:
        """Take `count` blocks from the front of the queue. Each has one holder.

        Raises NoFreeBlocks ("4 blocks are needed, 3 are free"), and takes none, if fewer than `count` are free.
        """
        if count > len(self._free):
            raise NoFreeBlocks(f"{count} blocks are needed, {len(self._free)} are free")
        blocks = [self._free.popitem(last=False)[0] for _ in range(count)]
        for block in blocks:
            self.ref_counts[block] = 1
        return blocks

    def touch(self, blocks: list[int]) -> None:
        """Each of `blocks` has one holder more. Asserts, with its number, that somebody holds it."""
        for block in blocks:
            assert self.ref_counts[block] > 0, f"block {block} is shared, and nobody holds it"
            self.ref_counts[block] += 1

    def free_blocks(self, blocks: list[int]) -> None:
        """Each of `blocks` has one holder less. With no holder left it returns to the front of the queue.

        The first of them is taken next. Raises ValueError ("block 3 is given back twice"), and changes nothing, if one
        of them is free or is there more often than it is held.
        """
        for block, count in Counter(blocks).items():
            if count > self.ref_counts[block]:
                raise ValueError(f"block {block} is given back twice")
        for block in reversed(blocks):
            self.ref_counts[block] -= 1
            if not self.ref_counts[block]:
                self._free[block] = None
                self._free.move_to_end(block, last=False)

    def check_integrity(self, tables: list[int]) -> None:
        """A block's count is how often it is in `tables`, all block tables end to end; at 0 it is in the queue."""
        holders = Counter(tables)
        counted = [holders[block] for block in range(self.num_blocks)]
        assert self.ref_counts == counted, f"reference counts {self.ref_counts}, in the tables {counted}"
        free = [block for block in range(self.num_blocks) if not holders[block]]
        assert sorted(self._free) == free, f"the queue has {sorted(self._free)}, in no table are {free}"
