"""The index of "vLLM v1 Block Manager", in our words and with its logic as it is; beside it, what stage 6 does."""

from collections import OrderedDict

from notebooks.helpers.claims.told import Case, sequence
from stages.bench.engines import silent
from stages.s6_prefix_caching.block_manager import BlockManager as CachedBlocks
from stages.s6_prefix_caching.sequence import Sequence

PROMPT = list(range(3, 3 + 40))


class Index:
    """`allocate_with_prefix_cache`, and `free`."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size, self.free_blocks = block_size, list(range(num_blocks - 1, -1, -1))
        self.ref_counts, self.index = [0] * num_blocks, dict[int, int]()

    def allocate(self, tokens: list[int]) -> tuple[list[int], int]:
        table, cached = [], 0
        for end in range(self.block_size, len(tokens) + 1, self.block_size):
            key = hash(tuple(tokens[:end]))
            if key in self.index:  # the fault: also after a miss
                block = self.index[key]
                cached += self.block_size
            else:
                block = self.free_blocks.pop()
                self.index[key] = block  # the fault: nothing is computed yet
            self.ref_counts[block] += 1
            table.append(block)
        remaining = len(tokens) - cached
        if 0 < remaining < self.block_size:  # the fault: more than a block remains as soon as one was missed
            table.append(self.free_blocks.pop())
            self.ref_counts[table[-1]] += 1
        return table, cached

    def free(self, table: list[int]) -> None:
        for block in table:
            self.ref_counts[block] -= 1
            if not self.ref_counts[block]:
                self.free_blocks.append(block)  # the fault: the index goes on naming it


class EvictsOldest:
    """The order of use. It checks the count, so nobody loses a block that it holds."""

    def __init__(self) -> None:
        self.lru, self.ref_counts = OrderedDict[int, None](), dict[int, int]()

    def use(self, block: int, count: int) -> None:
        self.ref_counts[block] = count
        self.lru[block] = None
        self.lru.move_to_end(block)

    def evict(self) -> int | None:
        while self.lru:
            block, _ = self.lru.popitem(last=False)
            if self.ref_counts[block] == 0:
                return block  # the fault: a held block before it has been popped, and is not put back
        return None


def cached_blocks(num_blocks: int, block_size: int) -> CachedBlocks:
    return CachedBlocks(num_blocks, block_size, enable_caching=True, observer=silent("s6"))


def admit(manager: CachedBlocks, seq: Sequence) -> None:
    """Allocate as stage 6's scheduler does: with what is found in the cache."""
    manager.allocate(seq, manager.find_hits(seq))


def of_index() -> list[Case]:
    return [of_the_last_block(), of_the_same_prompt_twice(), of_blocks_taken_again(), of_a_held_block()]


def of_the_last_block(size: int = 16) -> Case:
    table, _ = Index(8, size).allocate(PROMPT)
    ours, seq = cached_blocks(8, size), sequence("s6", "a", PROMPT)
    admit(ours, seq)
    told = f"{len(table)}: the last 8 have no slot"
    return Case("40 tokens in blocks of 16: how many blocks?", told, f"{len(seq.block_table)}")


def of_the_same_prompt_twice(size: int = 16) -> Case:
    told, ours = Index(8, size), cached_blocks(8, size)
    told.allocate(PROMPT[:33])
    admit(ours, sequence("s6", "a", PROMPT))
    again = sequence("s6", "b", PROMPT[:33])
    admit(ours, again)
    return Case(
        "The same prompt before the first was computed: how many tokens hit?",
        f"{told.allocate(PROMPT[:33])[1]}, of which none is there",
        f"{again.num_computed_tokens}",
    )


def of_blocks_taken_again(size: int = 16) -> Case:
    told = Index(3, size)
    told.free(told.allocate(PROMPT[:33])[0])
    told.allocate(list(range(1000, 1033)))
    return Case(
        "A prompt ends, another takes its blocks, the first comes again: how many tokens hit?",
        f"{told.allocate(PROMPT[:32])[1]}, with the other's keys and values",
        f"{evicted_hits(PROMPT[:33], size)}",
    )


def of_a_held_block() -> Case:
    lru = EvictsOldest()
    lru.use(0, count=1)
    lru.use(1, count=0)
    first = lru.evict()
    lru.ref_counts[0] = 0  # its holder ends
    left = "none" if lru.evict() is None else "block 0"
    return Case(
        "Block 0 is held, block 1 is not, and one is evicted. Then 0 is let go: which can be evicted now?",
        f"{left}: block {first} went, and block 0 left the order with it, for good",
        evictable_after(),
    )


def evicted_hits(prompt: list[int], size: int) -> int:
    """What stage 6 finds of a text whose blocks another has taken."""
    manager = cached_blocks(3, size)
    seqs = [sequence("s6", name, ids) for name, ids in (("a", prompt), ("b", list(range(1000, 1033))), ("c", prompt))]
    for seq in seqs[:2]:
        admit(manager, seq)
        seq.num_computed_tokens = seq.num_tokens
        manager.cache_blocks(seq, seq.num_tokens)
        manager.free(seq)
    admit(manager, seqs[2])
    manager.check_integrity()
    return seqs[2].num_computed_tokens


def evictable_after() -> str:
    """Two texts of a block each in a pool of two, one of them held while the other goes; then all can go."""
    manager = cached_blocks(2, 16)
    held, other = (sequence("s6", name, list(range(start, start + 16))) for name, start in (("a", 3), ("b", 300)))
    for seq in (held, other):
        admit(manager, seq)
        seq.num_computed_tokens = 16
        manager.cache_blocks(seq, 16)
    manager.free(other)
    third = sequence("s6", "c", list(range(600, 616)))
    admit(manager, third)
    manager.free(held)
    fourth = sequence("s6", "d", list(range(900, 916)))
    admit(manager, fourth)
    return f"block {fourth.block_table[0]}: whoever is let go joins the queue"
