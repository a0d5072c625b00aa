"""The ways to keep free blocks: the texts' stack with counts, and a bitmap and a queue, which two texts compare."""

from collections import deque
from typing import Any

from stages.s2_block_manager.block_pool import BlockPool


class Stack:
    """The pool of four texts: a stack of free ids, the highest on top, and a count of owners for each block."""

    def __init__(self, num_blocks: int) -> None:
        self.free_ids, self.counts = list(range(num_blocks)), [0] * num_blocks

    def take(self, count: int = 1) -> list[int]:
        """Take blocks one by one. Where too few are free, the error loses those before it."""
        blocks = [self.free_ids.pop() for _ in range(count)]
        for block in blocks:
            self.counts[block] = 1
        return blocks

    def share(self, blocks: list[int]) -> list[int]:
        """Return the same blocks for another owner."""
        for block in blocks:
            self.counts[block] += 1
        return list(blocks)

    def release(self, blocks: list[int]) -> None:
        """Take an owner from each block, and push those without one."""
        for block in blocks:
            self.counts[block] -= 1
            if self.counts[block] == 0:
                self.free_ids.append(block)


class BitmapPool:
    """A pool on one number: bit b is 1 if block b is free. It takes the lowest free blocks.

    A block costs one bit. The pool does not know in which order blocks were freed, and finding one reads all bits.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks, self._free = num_blocks, (1 << num_blocks) - 1

    @property
    def num_free_blocks(self) -> int:
        return self._free.bit_count()

    def get_new_blocks(self, count: int) -> list[int]:
        """Take blocks. Raise ValueError, and take none, if too few are free."""
        if count > self.num_free_blocks:
            raise ValueError(f"{count} blocks are needed, {self.num_free_blocks} are free")
        blocks = []
        for _ in range(count):
            lowest = self._free & -self._free
            self._free ^= lowest
            blocks.append(lowest.bit_length() - 1)
        return blocks

    def free_blocks(self, blocks: list[int]) -> None:
        """Return blocks. Raise ValueError if one is free."""
        for block in blocks:
            if self._free >> block & 1:
                raise ValueError(f"block {block} is freed twice")
            self._free |= 1 << block

    def __str__(self) -> str:
        """Return the bits, with block 0 on the left."""
        return format(self._free, f"0{self.num_blocks}b")[::-1]


class FirstInFirstOut(BlockPool):
    """A pool that returns the block that has been free for longest."""

    free: Any  # a deque, whose left end is the front of the queue

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks)
        self.free = deque(range(num_blocks))

    def get_new_blocks(self, count: int) -> list[int]:
        return [self.free.popleft() for _ in range(count)]

    def free_blocks(self, blocks: list[int]) -> None:
        self.free.extend(blocks)
