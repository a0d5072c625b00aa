"""*vLLM v1 Block Manager*: allocate_with_prefix_cache(), free() and evict_cached_blocks()."""

from collections import OrderedDict

from stages.bench.texts import attempt, in_stages
from stages.bench.texts.pools import Stack

BLOCK = 16
PROMPT, OTHER = list(range(3, 51)), list(range(1000, 1033))


class Index(Stack):
    """Blocks by a hash. A freed block goes back to the stack, and the index still points to it."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks)
        self.index = dict[int, int]()

    def look_up(self, keys: list[int]) -> tuple[list[int], int]:
        """Return a block for each key, and how many tokens were cached."""
        table, cached = list[int](), 0
        for key in keys:
            if key in self.index:  # also after a miss; tokens are never compared
                self.share([self.index[key]])
                cached += BLOCK  # of a short block, too
            else:
                [self.index[key]] = self.take()  # before it is computed
            table.append(self.index[key])
        return table, cached


class PrefixCache(Index):
    """The text's index: a key is the hash of the key before it and of 16 tokens."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks)
        self.lru = OrderedDict[int, int]()  # key: block

    def keys(self, tokens: list[int]) -> list[int]:
        """Return the key of each full block."""
        keys, key = list[int](), 0
        for start in range(0, len(tokens) - BLOCK + 1, BLOCK):
            key = hash((key, tuple(tokens[start : start + BLOCK])))
            keys.append(key)
        return keys

    def allocate(self, tokens: list[int]) -> tuple[list[int], int]:
        """Return a block table, and how many tokens were cached."""
        table, cached = self.look_up(self.keys(tokens))
        if 0 < len(tokens) - cached < BLOCK:  # more than a block remains after any miss, and then nothing is taken
            table += self.take()
        return table, cached

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


# ---- cases


def last_block() -> tuple[int, int]:
    ours = in_stages.admit(in_stages.prefix_cache(8), PROMPT[:40])
    return len(PrefixCache(8).allocate(PROMPT[:40])[0]), len(ours.block_table)


def uncomputed() -> tuple[int, int]:
    text, ours = PrefixCache(8), in_stages.prefix_cache(8)
    text.allocate(PROMPT[:33])
    in_stages.admit(ours, PROMPT[:33])
    return text.allocate(PROMPT[:33])[1], in_stages.admit(ours, PROMPT[:33]).num_computed_tokens


def no_prefix() -> int:
    text = PrefixCache(8)
    text.allocate(PROMPT)
    del text.index[text.keys(PROMPT)[0]]
    return text.allocate(PROMPT)[1]


def retaken() -> tuple[int, int]:
    text, ours = PrefixCache(3), in_stages.prefix_cache(3)
    text.release(text.allocate(PROMPT[:32])[0])
    text.allocate(OTHER)
    for tokens in (PROMPT[:33], OTHER):
        in_stages.serve(ours, tokens)
    return text.allocate(PROMPT[:32])[1], in_stages.admit(ours, PROMPT[:33]).num_computed_tokens


def still_free() -> str:
    text = PrefixCache(4)
    text.release(text.allocate(PROMPT[:32])[0])
    table, cached = text.allocate(PROMPT[:32])
    return f"{len({*table} & {*text.free_ids})} of {cached // BLOCK}"


def too_long() -> str:
    text = PrefixCache(2)
    error = attempt(lambda: text.allocate([*PROMPT, *PROMPT, 1, 2, 3, 4]))
    return f"{len(text.free_ids)} free, {len(text.index)} in the index ({error})"


def held() -> str:
    text = PrefixCache(4)
    table, _ = text.allocate(PROMPT[:32])
    text.lru.update(zip(text.keys(PROMPT[:32]), table, strict=True))  # a step that the text leaves out
    text.counts[table[1]] = 0
    first = text.evict(1)
    text.counts[table[0]] = 0
    return f"{first}, then {text.evict(1)}"


def pushed_twice() -> str:
    text = PrefixCache(4)
    [block], _ = text.allocate(PROMPT[:16])
    text.release([block])
    text.lru[text.keys(PROMPT[:16])[0]] = block
    text.evict(1)
    return f"{text.free_ids.count(block)} times"
