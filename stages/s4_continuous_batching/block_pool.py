"""BlockPool: which blocks are free. It knows nothing of sequences."""


class BlockPool:
    """Blocks 0 .. num_blocks - 1, and the stack of the free ones.

        [7][2] ... [0][3] top      get_new_blocks() takes from the top, free_blocks() returns to the top

    So the block taken next is the one returned last: it may still be in the processor's caches.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.free = [*reversed(range(num_blocks))]

    def get_new_blocks(self, count: int) -> list[int]:
        """Take `count` free blocks. There must be as many."""
        assert count <= len(self.free), f"{count} blocks are needed, {len(self.free)} are free"
        return [self.free.pop() for _ in range(count)]

    def free_blocks(self, blocks: list[int]) -> None:
        """Give `blocks` back, such that the first of them is taken next."""
        self.free += reversed(blocks)

    def check_integrity(self, held: list[int]) -> None:
        """Raise AssertionError unless each block is in one place: free, or in `held`, all block tables end to end."""
        assert sorted([*self.free, *held]) == [*range(self.num_blocks)], "a block is in two places, or in none"
