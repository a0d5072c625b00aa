"""BlockPool: which blocks are free. It knows nothing of sequences."""

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
        self._free = OrderedDict.fromkeys(range(num_blocks))  # a queue that also answers "is this block in it?"

    @property
    def num_free_blocks(self) -> int:
        return len(self._free)

    def get_new_blocks(self, count: int) -> list[int]:
        """Take `count` blocks from the front of the queue.

        Raises NoFreeBlocks ("4 blocks are needed, 3 are free"), and takes none, if fewer than `count` are free.
        """
        if count > len(self._free):
            raise NoFreeBlocks(f"{count} blocks are needed, {len(self._free)} are free")
        return [self._free.popitem(last=False)[0] for _ in range(count)]

    def free_blocks(self, blocks: list[int]) -> None:
        """Return `blocks` to the front of the queue, in their order: the first of them is taken next.

        Raises ValueError ("block 3 is given back twice"), and returns none, if one is free or is there twice.
        """
        for block, count in Counter(blocks).items():
            if count > 1 or block in self._free:
                raise ValueError(f"block {block} is given back twice")
        for block in reversed(blocks):
            self._free[block] = None
            self._free.move_to_end(block, last=False)

    def check_integrity(self, tables: list[int]) -> None:
        """Each block is in one place: in the queue, or in `tables`, all block tables end to end."""
        places = sorted([*self._free, *tables])
        assert places == list(range(self.num_blocks)), "a block is in two places, or in none"
