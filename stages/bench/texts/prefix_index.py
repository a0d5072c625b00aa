"""*vLLM v1 Block Manager*: allocate_with_prefix_cache(), free() and evict_cached_blocks()."""

from collections import OrderedDict

from stages.bench.engines import silent
from stages.bench.texts import Cases, attempt, sequence
from stages.s6_prefix_caching.block_manager import BlockManager
from stages.s6_prefix_caching.sequence import Sequence

BLOCK = 16
PROMPT = list(range(3, 51))


class PrefixCache:
    """The text's index of blocks: a key is the hash of the key before it and of 16 tokens."""

    def __init__(self, num_blocks: int) -> None:
        self.free_ids, self.counts = list(range(num_blocks)), [0] * num_blocks
        self.index, self.lru = dict[int, int](), OrderedDict[int, int]()  # key: block

    def keys(self, tokens: list[int]) -> list[int]:
        """Return the key of each full block."""
        keys, key = list[int](), 0
        for start in range(0, len(tokens) - BLOCK + 1, BLOCK):
            key = hash((key, tuple(tokens[start : start + BLOCK])))
            keys.append(key)
        return keys

    def allocate(self, tokens: list[int]) -> tuple[list[int], int]:
        """Return a block table, and how many tokens were cached."""
        table, cached = list[int](), 0
        for key in self.keys(tokens):
            if key in self.index:  # also after a miss; tokens are never compared
                block = self.index[key]
                self.counts[block] += 1
                cached += BLOCK
            else:
                block = self.free_ids.pop()
                self.counts[block] = 1
                self.index[key] = block  # before it is computed
            table.append(block)
        if 0 < len(tokens) - cached < BLOCK:  # more than a block remains after any miss, and then nothing is taken
            table.append(self.free_ids.pop())
            self.counts[table[-1]] = 1
        return table, cached

    def free(self, table: list[int]) -> None:
        for block in table:
            self.counts[block] -= 1
            if not self.counts[block]:
                self.free_ids.append(block)  # the index still points to it

    def evict(self, needed: int) -> int:
        """Evict from `lru`, which no step of the text fills."""
        evicted = 0
        while evicted < needed and self.lru:
            key, block = self.lru.popitem(last=False)
            if self.counts[block] == 0:  # otherwise the block has left the order for good
                del self.index[key]
                self.free_ids.append(block)  # where free() has already put it
                evicted += 1
        return evicted


def cases() -> Cases:
    ended, short, dropped = PrefixCache(4), PrefixCache(2), PrefixCache(8)
    ended.free(ended.allocate(PROMPT[:32])[0])
    table, cached = ended.allocate(PROMPT[:32])
    error = attempt(lambda: short.allocate([*PROMPT, *PROMPT, 1, 2, 3, 4]))
    dropped.allocate(PROMPT)
    del dropped.index[dropped.keys(PROMPT)[0]]
    return {
        "last_block": last_block(),
        "uncomputed": uncomputed(),
        "no_prefix": (f"{dropped.allocate(PROMPT)[1]}",),
        "retaken": retaken(),
        "still_free": (f"{len({*table} & {*ended.free_ids})} of {cached // BLOCK}",),
        "too_long": (f"{len(short.free_ids)} free, {len(short.index)} in the index ({error})",),
        "held": (held_block(),),
        "pushed_twice": (freed_twice(),),
    }


def last_block() -> tuple[str, str]:
    """Return the blocks of a prompt of 40 tokens."""
    table, _ = PrefixCache(8).allocate(PROMPT[:40])
    ours, seq = cached_manager(8), sequence("s6", "a", PROMPT[:40])
    admit(ours, seq)
    return f"{len(table)}", f"{len(seq.block_table)}"


def uncomputed() -> tuple[str, str]:
    """Return the hits of a prompt that comes twice before it is computed."""
    text, ours, again = PrefixCache(8), cached_manager(8), sequence("s6", "b", PROMPT[:33])
    text.allocate(PROMPT[:33])
    admit(ours, sequence("s6", "a", PROMPT[:33]))
    admit(ours, again)
    return f"{text.allocate(PROMPT[:33])[1]}", f"{again.num_computed_tokens}"


def retaken() -> tuple[str, str]:
    """Return the hits of a prompt that comes back after another one has taken its blocks."""
    text, other = PrefixCache(3), list(range(1000, 1033))
    text.free(text.allocate(PROMPT[:32])[0])
    text.allocate(other)
    manager, last = cached_manager(3), sequence("s6", "c", PROMPT[:33])
    for name, tokens in (("a", PROMPT[:33]), ("b", other)):
        serve(manager, sequence("s6", name, tokens))
    admit(manager, last)
    return f"{text.allocate(PROMPT[:32])[1]}", f"{last.num_computed_tokens}"


def held_block() -> str:
    """Evict while the oldest block is held, and again after it was freed. Return how many are evicted each time."""
    text, keys = PrefixCache(4), PrefixCache(4).keys(PROMPT[:32])
    table, _ = text.allocate(PROMPT[:32])
    text.lru.update(zip(keys, table, strict=True))  # a step that the text leaves out
    text.counts[table[1]] = 0
    first = text.evict(1)
    text.counts[table[0]] = 0
    return f"{first}, then {text.evict(1)}"


def freed_twice() -> str:
    """Return how often a block is on the free stack after it was freed and then evicted."""
    text, keys = PrefixCache(4), PrefixCache(4).keys(PROMPT[:16])
    table, _ = text.allocate(PROMPT[:16])
    text.free(table)
    text.lru[keys[0]] = table[0]
    text.evict(1)
    return f"{text.free_ids.count(table[0])} times"


# ---- stage 6


def cached_manager(num_blocks: int) -> BlockManager:
    """Return stage 6's manager, with its cache."""
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
