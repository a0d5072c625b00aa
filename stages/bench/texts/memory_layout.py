"""*PagedAttention at the level of memory*: its free list, its reference counts, and its map of a GPU's memory."""

from collections import defaultdict

from stages.bench.engines import silent
from stages.bench.texts import Cases, attempt, sequence
from stages.s5_cow_sampling.block_manager import BlockManager
from stages.s5_cow_sampling.block_pool import BlockPool

RANGES = (0x00000000, 0x0FFFFFFF), (0x10000000, 0x1FFFFFFF), (0x20000000, 0x207FFFFF)  # 35 GB, 40 GB, 128 MB


class CopyOnWrite:
    """The text's CopyOnWriteHandler on a stack of free ids. Counts begin at 0, and only a fork adds to them."""

    def __init__(self, num_blocks: int) -> None:
        self.free_ids, self.counts = list(range(num_blocks)), defaultdict[int, int](int)

    def fork(self, table: list[int]) -> list[int]:
        for block in table:
            self.counts[block] += 1
        return list(table)

    def write(self, table: list[int]) -> None:
        """Make the last block the owner's own. The text calls `_copy_block` here, which it does not have."""
        old = table[-1]
        if self.counts[old] > 1:
            table[-1] = self.free_ids.pop()  # its count stays 0
            self.counts[old] -= 1


def owners(num_forks: int) -> list[int]:
    """Return the block that each owner writes to: the parent, then its forks."""
    text = CopyOnWrite(8)
    parent = [text.free_ids.pop()]
    tables = [parent, *(text.fork(parent) for _ in range(num_forks))]
    for table in tables:
        text.write(table)
    return [table[-1] for table in tables]


def owners_in_stage_5(num_forks: int) -> list[int]:
    """Return the same with stage 5's block manager."""
    manager, seqs = BlockManager(8, 16, silent("s5")), [sequence("s5", str(n), [1] * 5) for n in range(num_forks + 1)]
    manager.allocate(seqs[0])
    seqs[0].num_computed_tokens = 5
    for seq in seqs[1:]:
        manager.fork(seqs[0], seq)
    for seq in seqs:
        seq.token_ids.append(1)
        manager.append_slot(seq)
    return [seq.block_table[-1] for seq in seqs]


def num_shared(blocks: list[int]) -> str:
    """Return how many owners write to a block of another one."""
    return f"{sum(blocks.count(block) > 1 for block in blocks)} of {len(blocks)}"


def cases() -> Cases:
    free_ids, pool = list(range(2)), BlockPool(2)
    block = free_ids.pop()
    for _ in range(2):
        free_ids.append(block)  # the text's free() does nothing else
    sizes = [(last + 1 - first) // 2**20 for first, last in RANGES]
    return {
        "fork_once": (num_shared(owners(1)), num_shared(owners_in_stage_5(1))),
        "fork_thrice": (num_shared(owners(3)), num_shared(owners_in_stage_5(3))),
        "freed_twice": (f"{free_ids}", attempt(lambda: pool.free_blocks(2 * pool.get_new_blocks(1)))),
        "map": (", ".join(f"{size} MB" for size in sizes),),
    }
