"""BlockPool: the free blocks. It knows nothing about sequences."""


class BlockPool:
    """Blocks 0 .. num_blocks - 1, and a stack of the free ones.

        [7][2] ... [0][3] top      get_new_blocks() takes from the top, free_blocks() returns to the top

    The block returned last is the next one taken: it may still be in the processor's caches.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.free = [*reversed(range(num_blocks))]

    def get_new_blocks(self, count: int) -> list[int]:
        """Take `count` blocks off the top of the stack, and return them in the order in which they come off.

        Raise AssertionError with both numbers, and take none, if fewer than `count` are free.
        """
        assert count <= len(self.free), f"blocks needed: {count}, free: {len(self.free)}"
        return [self.free.pop() for _ in range(count)]

    def free_blocks(self, blocks: list[int]) -> None:
        """Put `blocks` back on the stack, with the first of them on top: it is the next one taken."""
        self.free += reversed(blocks)

    def check_integrity(self, held: list[int]) -> None:
        """Raise AssertionError unless each block is in one place: free, or in `held`, all block tables end to end."""
        found = f"free {sorted(self.free)}, in tables {sorted(held)}"
        assert sorted([*self.free, *held]) == [*range(self.num_blocks)], f"a block is in two places or in none: {found}"
