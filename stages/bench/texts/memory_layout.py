"""*PagedAttention at the level of memory*: its free list, its reference counts, and its map of a GPU's memory."""

from stages.bench.texts import attempt, in_stages
from stages.bench.texts.pools import Stack
from stages.s5_cow_sampling.block_pool import BlockPool

RANGES = (0x00000000, 0x0FFFFFFF), (0x10000000, 0x1FFFFFFF), (0x20000000, 0x207FFFFF)  # 35 GB, 40 GB, 128 MB


def write(pool: Stack, table: list[int]) -> int:
    """Make the last block the owner's own, and return it. The text calls `_copy_block`, which it does not have."""
    old = table[-1]
    if pool.counts[old] > 1:
        table[-1] = pool.free_ids.pop()  # its count stays 0
        pool.counts[old] -= 1
    return table[-1]


def sharing(num_forks: int) -> tuple[str, str]:
    """Let a parent and its forks write. Return how many of them write to a block of another one."""
    pool = Stack(8)
    parent = [pool.free_ids.pop()]  # counts begin at 0, and only a fork adds to them
    tables = [parent, *(pool.share(parent) for _ in range(num_forks))]
    written = [write(pool, table) for table in tables]
    ours = [seq.block_table[-1] for seq in in_stages.forked_and_appended(5, num_forks)]
    text, stage = (sum(blocks.count(block) > 1 for block in blocks) for blocks in (written, ours))
    return f"{text} of {len(tables)}", f"{stage} of {len(tables)}"


def fork_once() -> tuple[str, str]:
    return sharing(1)


def fork_thrice() -> tuple[str, str]:
    return sharing(3)


def freed_twice() -> tuple[str, str]:
    free_ids, pool = list(range(2)), BlockPool(2)
    block = free_ids.pop()
    for _ in range(2):
        free_ids.append(block)  # the text's free() does nothing else
    return f"{free_ids}", attempt(lambda: pool.free_blocks(2 * pool.get_new_blocks(1)))


def ranges() -> str:
    return ", ".join(f"{(last + 1 - first) // 2**20} MB" for first, last in RANGES)
