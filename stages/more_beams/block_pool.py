"""BlockPool: the free blocks, and how many block tables hold each of the others. It knows nothing of sequences."""

from collections import Counter


class BlockPool:
    """Blocks 0 .. num_blocks - 1, and the stack of the free ones.

        [7][2] ... [0][3] top      get_new_blocks() takes from the top, free_blocks() returns to the top

    The block returned last is the next one taken: it may still be in the processor's caches.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.free = [*reversed(range(num_blocks))]
        self.ref_counts = [0] * num_blocks  # how many block tables hold each block

    def get_new_blocks(self, count: int) -> list[int]:
        """Take `count` free blocks, and return them with one holder each. There must be as many."""
        assert count <= len(self.free), f"blocks needed: {count}, free: {len(self.free)}"
        blocks = [self.free.pop() for _ in range(count)]
        for block in blocks:
            self.ref_counts[block] = 1
        return blocks

    def touch(self, blocks: list[int]) -> None:
        """Add a holder to each of `blocks`, all of which have one already."""
        for block in blocks:
            assert self.ref_counts[block] > 0, f"block {block} is free"
            self.ref_counts[block] += 1

    def free_blocks(self, blocks: list[int]) -> None:
        """Remove a holder from each of `blocks`. Those without holders are free, and the first one is taken next."""
        for block in reversed(blocks):
            assert self.ref_counts[block] > 0, f"block {block} is freed, and no table holds it"
            self.ref_counts[block] -= 1
            if self.ref_counts[block] == 0:
                self.free.append(block)

    def check_integrity(self, held: list[int]) -> None:
        """Raise AssertionError unless `held`, the blocks of all holders, matches ref_counts, and the rest is free."""
        holders = Counter(held)
        counted = [holders[block] for block in range(self.num_blocks)]
        assert self.ref_counts == counted, f"reference counts are {self.ref_counts}, the tables hold {counted}"
        free = [block for block in range(self.num_blocks) if not holders[block]]
        assert sorted(self.free) == free, f"free blocks are {sorted(self.free)}, blocks in no table are {free}"
