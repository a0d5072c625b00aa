"""Prefix caches as two texts tell them, in our words and with their faults.

"vLLM v1 Block Manager: KV cache at the pointer level" has an allocator; it only says who holds what, there are no keys
and values. `cases` asks it and stage 6's manager the same questions. "paged attention", a blog post, hashes a block's
own tokens: `hashes` has that, and stage 6's, believed and compared.
"""

from collections import OrderedDict
from typing import Any, NamedTuple

from stages.s6_prefix_caching.block_manager import BlockManager
from stages.s6_prefix_caching.input_processor import InputProcessor
from stages.s6_prefix_caching.llama import ModelConfig
from stages.s6_prefix_caching.prefix_cache import CachedBlock, Hash, PrefixCache, hash_block
from stages.s6_prefix_caching.sampling import SamplingParams
from stages.s6_prefix_caching.sequence import Sequence


class Told(NamedTuple):
    table: list[int]
    num_cached_tokens: int


class AsTold:
    """Blocks with reference counts, an index by hash, and an order of use."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self._block_size = block_size
        self._free = list(range(num_blocks - 1, -1, -1))
        self._ref_counts = [0] * num_blocks
        self._index: dict[int, int] = {}  # hash -> block
        self._used: OrderedDict[int, None] = OrderedDict()  # all blocks that were ever taken, the least recent first

    def allocate(self, token_ids: list[int]) -> Told:
        table, cached = [], 0
        for end in range(self._block_size, len(token_ids) + 1, self._block_size):
            key = hash(tuple(token_ids[:end]))
            if key in self._index:  # also after a miss
                block = self._index[key]
                cached += self._block_size
            else:
                block = self._take()
                self._index[key] = block  # nothing is computed yet
            self._hold(block)
            table.append(block)
        remaining = len(token_ids) - cached
        if 0 < remaining < self._block_size:  # more than a block remains as soon as one was missed
            block = self._take()
            self._hold(block)
            table.append(block)
        return Told(table, cached)

    def free(self, table: list[int]) -> None:
        """The index goes on naming the blocks."""
        for block in table:
            self._ref_counts[block] -= 1
            if self._ref_counts[block] == 0:
                self._free.append(block)

    def _hold(self, block: int) -> None:
        self._ref_counts[block] += 1
        self._used[block] = None
        self._used.move_to_end(block)

    def _take(self) -> int:
        """If none is free, the one unused longest, whoever holds it."""
        if self._free:
            return self._free.pop()
        block, _ = self._used.popitem(last=False)
        return block


class Ours:
    """Stage 6's manager with the same two verbs. `compute` says that the model has run."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self._manager = BlockManager(num_blocks, block_size, PrefixCache(block_size))
        model = ModelConfig(2**16, 8, 8, 1, 1, 1, 8)
        self.input_processor = InputProcessor(model, None, max_model_len=2**16, seed=0)
        self._number = 0

    def allocate(self, token_ids: list[int]) -> tuple[Sequence, Told]:
        self._number += 1
        (seq,) = self.input_processor.process(str(self._number), token_ids, SamplingParams())
        self._manager.allocate(seq)
        return seq, Told(list(seq.block_table), seq.num_computed_tokens)

    def compute(self, seq: Sequence) -> None:
        seq.num_computed_tokens = seq.num_tokens
        self._manager.cache_blocks(seq)

    def free(self, seq: Sequence) -> None:
        self._manager.free(seq)
        self._manager.check_integrity()


class Case(NamedTuple):
    question: str
    told: str
    ours: str


def cases(block_size: int = 16) -> list[Case]:
    """Four questions, what the text's allocator answers, and what stage 6's does."""
    return [last_block(block_size), not_computed(block_size), freed(block_size), held(block_size)]


def last_block(size: int) -> Case:
    """A prompt of two blocks and a half."""
    prompt = list(range(3, 3 + 2 * size + size // 2))
    told = AsTold(8, size).allocate(prompt)
    _, ours = Ours(8, size).allocate(prompt)
    return Case(
        f"{len(prompt)} tokens in blocks of {size}: how many blocks?",
        f"{len(told.table)}: the tokens of the last one have no slot",
        f"{len(ours.table)}",
    )


def not_computed(size: int) -> Case:
    """The same prompt again before a step has run."""
    prompt = list(range(3, 3 + 2 * size + 1))
    teller, manager = AsTold(8, size), Ours(8, size)
    teller.allocate(prompt)
    manager.allocate(prompt)
    told, (_, ours) = teller.allocate(prompt), manager.allocate(prompt)
    return Case(
        "The same prompt again, before the first was computed: how many tokens hit?",
        f"{told.num_cached_tokens}, of which none is there",
        f"{ours.num_cached_tokens}",
    )


def freed(size: int) -> Case:
    """A text that was given back, and whose blocks another has overwritten."""
    first, second = ([start + i for i in range(2 * size + 1)] for start in (3, 1000))
    teller, manager = AsTold(3, size), Ours(3, size)
    teller.free(teller.allocate(first).table)
    teller.allocate(second)
    for text in (first, second):
        seq, _ = manager.allocate(text)
        manager.compute(seq)
        manager.free(seq)
    told, (_, ours) = teller.allocate(first), manager.allocate(first)
    return Case(
        "A prompt ends, another takes its blocks, the first comes again: how many tokens hit?",
        f"{told.num_cached_tokens}, with the other's keys and values",
        f"{ours.num_cached_tokens}",
    )


def held(size: int) -> Case:
    """A pool that one sequence fills."""
    teller, manager = AsTold(2, size), Ours(2, size)
    first = teller.allocate(list(range(3, 3 + 2 * size)))
    second = teller.allocate(list(range(1000, 1000 + size)))
    manager.allocate(list(range(3, 3 + 2 * size)))
    try:
        manager.allocate(list(range(1000, 1000 + size)))
        answer = "a block is lost"
    except RuntimeError as error:
        answer = f'none: "{error}"'
    taken = sorted({*first.table} & {*second.table})
    return Case(
        "One sequence holds the whole pool, another comes: which block is taken?",
        f"block {taken[0]}, which the first still holds",
        answer,
    )


# ---- the hash


class Believed(PrefixCache):
    """Whatever block has the hash is taken for the one looked for."""

    def match(self, hashes: list[Hash], token_ids: list[int]) -> list[CachedBlock]:
        found: list[CachedBlock] = []
        for block_hash in hashes:
            cached = self._index.get(block_hash)
            if cached is None:
                break
            found.append(cached)
        return found


def of_own_tokens(parent: Hash, token_ids: list[int]) -> Hash:
    return hash_block(b"", token_ids)


def always_the_same(parent: Hash, token_ids: list[int]) -> Hash:
    return b"7"


def hashes(size: int) -> dict[str, PrefixCache | None]:
    """Prefix caches that tell texts apart by different means, and none."""
    return {
        "none": None,
        "chained, compared: stage 6": PrefixCache(size),
        "of own tokens, believed: the blog post": Believed(size, of_own_tokens),
        "of own tokens, compared": PrefixCache(size, of_own_tokens),
        "the same for all, compared": PrefixCache(size, always_the_same),
    }


def three_stories(tokenizer: Any, size: int) -> list[list[int]]:
    """Two stories of two blocks and a little more; a third begins like the first and goes on like the second."""
    fox = "The fox had stolen a goose from the farmer, and he ran with it into the dark wood"
    girl = "The princess had lost her golden ring in the sea, and she wept and called the fish"
    ran = "and he ran as fast as he could, for the dogs were behind him all"
    wept = "who came and asked her why she wept, and she told him of the ring that she had lost"
    first, second = (tokenizer.encode(text)[:size] for text in (fox, girl))
    ends = [tokenizer.encode(text)[1 : 1 + size] for text in (ran, wept)]
    then = tokenizer.encode("and then")[1:]
    stories = [first + ends[0] + then, second + ends[1] + then, first + ends[1] + then]
    assert all(len(story) == 2 * size + len(then) for story in stories), "a text is too short"
    return stories
