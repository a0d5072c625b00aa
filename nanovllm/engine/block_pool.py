"""BlockPool: how many hold each block, which blocks are free, and which text is in which. It knows no sequences."""

from collections import Counter, OrderedDict
from collections.abc import Callable
from itertools import islice

from .prefix_cache import BlockHash


class NoFreeBlocks(RuntimeError):
    """Fewer blocks are free than are needed."""


class BlockPool:
    """Blocks 0 .. num_blocks - 1, and the queue of the free ones. Each operation takes O(1) a block.

        front [3][0][7] ... [5] | [2][9][4] back      get_new_blocks() takes from the front
              nothing of use    | cached              free_blocks() returns a cached block to the back, others to front

    So a cached block keeps its text until all others are taken, and then the least recently used one goes first.
    """

    def __init__(self, num_blocks: int, on_evict: Callable[[int, BlockHash], None] | None = None) -> None:
        """`on_evict` is told of a cached block and its text before the block is taken for something else."""
        self.num_blocks = num_blocks
        self._on_evict = on_evict
        self.ref_counts = [0] * num_blocks  # how many tables hold each block
        self._free = OrderedDict.fromkeys(range(num_blocks))  # a queue that also answers "is this block in it?"
        self._cached: dict[BlockHash, int] = {}  # the index: the block of each cached text
        self._hashes: dict[int, BlockHash] = {}  # and the text of each cached block

    @property
    def num_free_blocks(self) -> int:
        return len(self._free)

    def get_new_blocks(self, count: int) -> list[int]:
        """Take `count` blocks from the front of the queue. Each has one holder, and its text is forgotten.

        Raises NoFreeBlocks ("4 blocks are needed, 3 are free"), and takes none, if fewer than `count` are free.
        """
        if count > len(self._free):
            raise NoFreeBlocks(f"{count} blocks are needed, {len(self._free)} are free")
        blocks = list(islice(self._free, count))
        for block in blocks:  # first: if this raises, nothing has changed
            if self._on_evict and block in self._hashes:
                self._on_evict(block, self._hashes[block])
        for block in blocks:
            del self._free[block]
            self.ref_counts[block] = 1
            if block in self._hashes:
                del self._cached[self._hashes.pop(block)]
        return blocks

    def touch(self, blocks: list[int]) -> None:
        """Each of `blocks` has one holder more. Asserts, with its number, that it is held or cached."""
        for block in blocks:
            assert self.ref_counts[block] > 0 or block in self._hashes, f"block {block} is neither held nor cached"
            self._free.pop(block, None)
            self.ref_counts[block] += 1

    def free_blocks(self, blocks: list[int]) -> None:
        """Each of `blocks` has one holder less. With no holder left it returns to the queue.

        Uncached blocks go to the front, the first of them is taken next. Cached blocks go to the back, the last of them
        first: the end of a text is evicted before its beginning. Raises ValueError ("block 3 is given back twice"), and
        changes nothing, if one of them is free or is there more often than it is held.
        """
        for block, count in Counter(blocks).items():
            if count > self.ref_counts[block]:
                raise ValueError(f"block {block} is given back twice")
        for block in reversed(blocks):
            self.ref_counts[block] -= 1
            if not self.ref_counts[block]:
                self._free[block] = None
                if block not in self._hashes:
                    self._free.move_to_end(block, last=False)

    def cache_block(self, block: int, block_hash: BlockHash) -> None:
        """`block` holds this text until it is taken anew, and is not written. If another does, nothing changes."""
        if block_hash not in self._cached:
            self._cached[block_hash], self._hashes[block] = block, block_hash

    def get_cached_block(self, block_hash: BlockHash) -> int | None:
        return self._cached.get(block_hash)

    def reset_prefix_cache(self) -> None:
        """Forget all texts. The free blocks keep their order."""
        self._cached.clear()
        self._hashes.clear()

    def check_integrity(self, tables: list[int]) -> None:
        """A block's count is how often it is in `tables`, all block tables end to end; at 0 it is in the queue."""
        holders = Counter(tables)
        counted = [holders[block] for block in range(self.num_blocks)]
        assert self.ref_counts == counted, f"reference counts {self.ref_counts}, in the tables {counted}"
        free = [block for block in range(self.num_blocks) if not holders[block]]
        assert sorted(self._free) == free, f"the queue has {sorted(self._free)}, in no table are {free}"
        assert {text: block for block, text in self._hashes.items()} == self._cached, "the index has others"
        is_cached = [block in self._hashes for block in self._free]
        assert is_cached == sorted(is_cached), f"a cached block stands before one that is not: {list(self._free)}"
