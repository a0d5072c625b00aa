"""BlockPool: which blocks are free. It knows nothing of sequences."""


class NoFreeBlocks(RuntimeError):
    """Fewer blocks are free than are needed."""


class BlockPool:
    """Blocks 0 .. num_blocks - 1 and the list of those that are free. Each operation takes O(1) a block.

    Last in, first out: the block taken next is the one given back last, which may still be in the processor's caches.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))  # taken from the end: block 0 first
        self._held = bytearray(num_blocks)  # 1 for a block that is not free

    @property
    def num_free_blocks(self) -> int:
        return len(self._free)

    def get_new_blocks(self, count: int) -> list[int]:
        """Blocks that are from now on held, the one given back last comes first.

        Raises NoFreeBlocks, with both numbers, and takes none, if fewer than `count` are free.
        """
        start = len(self._free) - count
        if start < 0:
            raise NoFreeBlocks(f"{count} blocks are needed, {len(self._free)} are free")
        blocks = self._free[start:]
        del self._free[start:]
        blocks.reverse()
        for block in blocks:
            self._held[block] = 1
        return blocks

    def free_blocks(self, blocks: list[int]) -> None:
        """The first of them will be the next one taken.

        Raises ValueError, which names the block, and gives none back, if one of them is not held or is there twice.
        """
        held = self._held
        for i, block in enumerate(blocks):
            if not held[block]:
                for marked in blocks[:i]:
                    held[marked] = 1
                raise ValueError(f"block {block} is given back twice")
            held[block] = 0
        self._free += reversed(blocks)

    def check_integrity(self, tables: list[int]) -> None:
        """Each block is in one place: in the free list, or in `tables`, all block tables end to end, and marked so."""
        places = sorted([*self._free, *tables])
        assert places == list(range(self.num_blocks)), "a block is in two places, or in none"
        marked = [block for block, is_held in enumerate(self._held) if is_held]
        assert marked == sorted(tables), f"blocks {marked} are marked as held, the tables have {sorted(tables)}"
