"""*vLLM v1 Block Manager*: allocate_with_prefix_cache(), free() and the order of eviction."""

from collections import OrderedDict

from notebooks.helpers.claims.programs import Case, sequence
from stages.bench.engines import silent
from stages.s6_prefix_caching.block_manager import BlockManager
from stages.s6_prefix_caching.sequence import Sequence

BLOCK = 16
PROMPT = list(range(3, 43))


class PrefixCache:
    """The text's index of blocks by the hash of a prompt's beginning."""

    def __init__(self, num_blocks: int) -> None:
        self.free_blocks = list(range(num_blocks - 1, -1, -1))
        self.ref_counts, self.index = [0] * num_blocks, dict[int, int]()

    def allocate_with_prefix_cache(self, tokens: list[int]) -> tuple[list[int], int]:
        table, cached = [], 0
        for end in range(BLOCK, len(tokens) + 1, BLOCK):
            key = hash(tuple(tokens[:end]))  # tokens are never compared
            if key in self.index:  # also after a miss
                block = self.index[key]
                cached += BLOCK
            else:
                block = self.free_blocks.pop()
                self.index[key] = block  # before it is computed
            self.ref_counts[block] += 1
            table.append(block)
        remaining = len(tokens) - cached
        if 0 < remaining < BLOCK:  # more than a block remains after any miss, and then nothing is taken
            table.append(self.free_blocks.pop())
            self.ref_counts[table[-1]] += 1
        return table, cached

    def free(self, table: list[int]) -> None:
        for block in table:
            self.ref_counts[block] -= 1
            if not self.ref_counts[block]:
                self.free_blocks.append(block)  # the index still points to it


class LRU:
    """The text's order of eviction."""

    def __init__(self) -> None:
        self.order, self.ref_counts = OrderedDict[int, None](), dict[int, int]()

    def use(self, block: int, ref_count: int) -> None:
        self.ref_counts[block] = ref_count
        self.order[block] = None
        self.order.move_to_end(block)

    def evict(self) -> int | None:
        while self.order:
            block, _ = self.order.popitem(last=False)
            if self.ref_counts[block] == 0:
                return block  # held blocks before it have left the order, and never return to it
        return None


def cases() -> list[Case]:
    return [last_block(), before_it_is_computed(), after_it_was_freed(), held_block()]


def last_block() -> Case:
    table, _ = PrefixCache(8).allocate_with_prefix_cache(PROMPT)
    ours, seq = cached_manager(8), sequence("s6", "a", PROMPT)
    admit(ours, seq)
    return Case(
        "A prompt of 40 tokens. How many blocks of 16 does it get?",
        f"{len(table)}: its last {len(PROMPT) - BLOCK * len(table)} tokens have no slot",
        f"{len(seq.block_table)}",
    )


def before_it_is_computed() -> Case:
    text, ours, again = PrefixCache(8), cached_manager(8), sequence("s6", "b", PROMPT[:33])
    text.allocate_with_prefix_cache(PROMPT[:33])
    admit(ours, sequence("s6", "a", PROMPT))
    admit(ours, again)
    return Case(
        "The same 33 tokens arrive twice before the first prompt is computed. How many tokens of the second hit?",
        f"{text.allocate_with_prefix_cache(PROMPT[:33])[1]}, in blocks that are still empty",
        f"{again.num_computed_tokens}",
    )


def after_it_was_freed() -> Case:
    text, other = PrefixCache(3), list(range(1000, 1033))
    text.free(text.allocate_with_prefix_cache(PROMPT[:33])[0])
    text.allocate_with_prefix_cache(other)
    manager, last = cached_manager(3), sequence("s6", "c", PROMPT[:33])
    for name, tokens in (("a", PROMPT[:33]), ("b", other)):
        serve(manager, sequence("s6", name, tokens))
    admit(manager, last)
    return Case(
        "A prompt ends, another one takes its blocks, and the first prompt returns. How many of its tokens hit?",
        f"{text.allocate_with_prefix_cache(PROMPT[:32])[1]}, with the other prompt's keys and values",
        f"{last.num_computed_tokens}",
    )


def held_block() -> Case:
    text = LRU()
    text.use(0, ref_count=1)
    text.use(1, ref_count=0)
    first = text.evict()
    text.ref_counts[0] = 0  # its sequence ends
    second = text.evict()
    return Case(
        "Block 0 is held, and block 1 is evicted. Then block 0 is freed. Which block can be evicted now?",
        f"{'none' if second is None else second}: the search that found block {first} dropped block 0 for good",
        "block 0: a freed block joins the queue",
    )


# ---- stage 6


def cached_manager(num_blocks: int) -> BlockManager:
    return BlockManager(num_blocks, BLOCK, enable_caching=True, observer=silent("s6"))


def admit(manager: BlockManager, seq: Sequence) -> None:
    """Allocate as stage 6's scheduler does, with the hits."""
    manager.allocate(seq, manager.find_hits(seq))


def serve(manager: BlockManager, seq: Sequence) -> None:
    """Admit a sequence, compute its prompt, and free it."""
    admit(manager, seq)
    seq.num_computed_tokens = seq.num_tokens
    manager.cache_blocks(seq, seq.num_tokens)
    manager.free(seq)
