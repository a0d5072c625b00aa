"""BlockManager: who holds which blocks of the pool. Several sequences may hold one block, until one of them writes.

    block size 4          A has 6 tokens       fork(A, B, 6)          B's next token: append_slot(B) answers 0 -> 1
    block tables          A: [3, 0]            A: [3, 0]              A: [3, 0]
                                               B: [3, 0]              B: [3, 1]
    reference counts      3: 1    0: 1         3: 2    0: 2           3: 2    0: 1    1: 1

The idea is an operating system's: fork() copies the table of a process, not its memory, and a page is copied only when
one of those who share it writes to it (Kwon et al. 2023, arXiv:2309.06180).
"""

from collections import Counter
from typing import NamedTuple

from .block_pool import BlockPool, NoFreeBlocks
from .kv_cache import PoolReport
from .prefix_cache import CachedBlock, PrefixCache, PrefixCacheStats
from .sequence import Sequence, shared_prefix


class BlockCopy(NamedTuple):
    """What is in block `source` must be in `target` too, before the next step writes."""

    source: int
    target: int


class BlockManager:
    """A block table for each sequence. Only a sequence that holds a block alone may write to it."""

    def __init__(self, num_blocks: int, block_size: int, prefix_cache: PrefixCache | None = None) -> None:
        """Without a `prefix_cache` nothing is ever cached."""
        self.num_blocks, self.block_size = num_blocks, block_size
        self.prefix_cache = prefix_cache or PrefixCache(block_size)
        self._is_caching = prefix_cache is not None
        self._pool = BlockPool(num_blocks, self.prefix_cache.blocks)
        self._holders: dict[Sequence, None] = {}  # in order of arrival

    @property
    def num_free_blocks(self) -> int:
        """Cached blocks that nobody holds count too."""
        return self._pool.num_free

    def num_blocks_for(self, leader: Sequence, *followers: Sequence) -> int:
        """Blocks for all tokens that a group has now, when all that its followers share with the leader is shared."""
        tails = [
            cdiv(seq.num_tokens, self.block_size) - shared_prefix(leader, seq) // self.block_size
            for seq in followers
            if seq.token_ids != leader.token_ids
        ]
        return cdiv(leader.num_tokens, self.block_size) + sum(tails)

    def can_allocate(self, *group: Sequence, spare: int = 0) -> bool:
        """Whether there is room for a group, with `spare` blocks left."""
        return self._num_blocks_to_take(*group) + spare <= self.num_free_blocks

    def allocate(self, seq: Sequence) -> None:
        """Blocks for all tokens that `seq` has now: for its beginning those that are cached, which count as computed.

        Raises NoFreeBlocks, and changes nothing, if too few are free.
        """
        assert seq not in self._holders, f"request {seq.request_id} holds blocks already"
        needed = self._num_blocks_to_take(seq)
        if needed > self.num_free_blocks:
            raise NoFreeBlocks(f"{needed} blocks are needed, {self.num_free_blocks} are free")
        self._hold(seq, self._hits(seq))
        seq.block_table += self._pool.take(cdiv(seq.num_tokens, self.block_size) - len(seq.block_table))
        self.prefix_cache.stats.queried += seq.num_tokens
        self.prefix_cache.stats.hit += seq.num_computed_tokens
        if seq.num_cached_tokens is None:
            seq.num_cached_tokens = seq.num_computed_tokens

    def fork(self, parent: Sequence, child: Sequence, num_tokens: int) -> None:
        """`child` begins with the parent's first `num_tokens` tokens: it holds their blocks too, and nothing is copied.

        They count as computed for the child, which must hold no blocks yet. If more of its own beginning is cached, it
        holds that instead. Raises ValueError with both numbers, and changes nothing, if the parent has not computed as
        many.
        """
        if parent.num_computed_tokens < num_tokens:
            raise ValueError(f"{num_tokens} tokens to share, {parent.num_computed_tokens} are computed")
        assert child not in self._holders, f"request {child.request_id} holds blocks already"
        hits = self._hits(child)
        if len(hits) * self.block_size > num_tokens:
            self._hold(child, hits)
            return
        blocks = parent.block_table[: cdiv(num_tokens, self.block_size)]
        self._pool.share(blocks)
        child.block_table, child.num_computed_tokens = blocks, num_tokens
        child.prefix = parent.prefix[: num_tokens // self.block_size]
        self._holders[child] = None

    def cache_blocks(self, seq: Sequence) -> None:
        """The blocks of `seq` that are full and computed by now may be hit from now on."""
        num_full = seq.num_computed_tokens // self.block_size if self._is_caching else 0
        self.prefix_cache.extend_hashes(seq.block_hashes, seq.token_ids, num_full)
        for i in range(len(seq.prefix), num_full):
            token_ids = seq.token_ids[i * self.block_size : (i + 1) * self.block_size]
            parent = seq.prefix[-1] if seq.prefix else None
            seq.prefix.append(self.prefix_cache.insert(seq.block_hashes[i], parent, token_ids, seq.block_table[i]))

    def num_blocks_to_append(self, *seqs: Sequence) -> int:
        """How many append_slot() will take for all of these, one after the other.

        If all who hold a block are among them, the last one writes in place.
        """
        num_new = sum(self._num_missing_blocks(seq) for seq in seqs)
        shared = [block for seq in seqs if (block := self._shared_block(seq)) is not None]
        if not shared:
            return num_new
        return num_new + sum(min(count, self._pool.ref_count(block) - 1) for block, count in Counter(shared).items())

    def can_append(self, *seqs: Sequence) -> bool:
        """Whether append_slot() would succeed for all of these."""
        return self.num_blocks_to_append(*seqs) <= self.num_free_blocks

    def append_slot(self, seq: Sequence) -> BlockCopy | None:
        """Make sure that `seq` has slots for all its tokens, and holds alone those that it has not computed yet.

        It was allocated or forked. If the block that it writes to next is shared, a new one takes its place in the
        table, and the answer is the copy to make. If it is cached, it is so no more. Raises NoFreeBlocks, and changes
        nothing, if too few blocks are free.
        """
        assert seq in self._holders, f"request {seq.request_id} was never allocated"
        source = self._shared_block(seq)
        new = self._pool.take(self._num_missing_blocks(seq) + (source is not None))
        copy = None
        if source is not None:
            copy = BlockCopy(source, new.pop(0))
            seq.block_table[seq.num_computed_tokens // self.block_size] = copy.target
            self._pool.give_back([source])
        elif seq.num_computed_tokens < len(seq.block_table) * self.block_size:
            self.prefix_cache.blocks.forget(seq.block_table[seq.num_computed_tokens // self.block_size])
        seq.block_table += new
        return copy

    def free(self, seq: Sequence) -> None:
        """`seq` holds its blocks no more: its table is then empty.

        Raises ValueError, and changes nothing, if it holds no blocks, or if its table names one that is not held.
        """
        if seq not in self._holders:
            raise ValueError(f"request {seq.request_id} holds no blocks")
        self._pool.give_back(seq.block_table)
        del self._holders[seq]
        seq.block_table, seq.prefix = [], []

    def reset_prefix_cache(self) -> bool:
        """Forget all that is cached, and the statistics. False, and nothing happens, while somebody holds blocks."""
        if self._holders:
            return False
        self._pool.forget_all()
        self.prefix_cache.stats = PrefixCacheStats()
        return True

    def report(self) -> PoolReport:
        """What of the pool is promised, held and used now."""
        return PoolReport(
            num_blocks=self.num_blocks,
            block_size=self.block_size,
            promised=self.block_size * sum(cdiv(seq.max_num_tokens, self.block_size) for seq in self._holders),
            tables=tuple((tuple(seq.block_table), seq.num_computed_tokens) for seq in self._holders),
        )

    def check_integrity(self) -> None:
        """Every block is free or counted once for each table it is in, and no table is longer than its tokens need."""
        self._pool.check_integrity(self._tables())
        for seq in self._holders:
            assert len(set(seq.block_table)) == len(seq.block_table), f"a block is twice in {seq.block_table}"
            most = cdiv(seq.num_tokens, self.block_size)
            assert len(seq.block_table) <= most, f"{len(seq.block_table)} blocks for {seq.num_tokens} tokens"
            assert seq.num_computed_tokens <= len(seq.block_table) * self.block_size

    def _tables(self) -> list[int]:
        """All blocks that are held, as often as they are."""
        return [block for seq in self._holders for block in seq.block_table]

    def _num_blocks_to_take(self, *group: Sequence) -> int:
        """Blocks of a group that are free now: all but those that it hits and others hold."""
        hits = [hit.places[self.prefix_cache.blocks] for hit in self._hits(group[0])]
        return self.num_blocks_for(*group) - sum(self._pool.ref_count(block) > 0 for block in hits)

    def _hits(self, seq: Sequence) -> list[CachedBlock]:
        """The beginning of `seq` that is cached, in whole blocks; its last token is to be computed in any case.

        Nothing while it awaits logprobs of its prompt. Without a prefix cache there is nothing, and nothing is hashed.
        """
        may_hit = self._is_caching and not seq.awaits_prompt_logprobs
        most = (seq.num_tokens - 1) // self.block_size if may_hit else 0
        self.prefix_cache.extend_hashes(seq.block_hashes, seq.token_ids, most)
        return self.prefix_cache.match(seq.block_hashes[:most], seq.token_ids)

    def _hold(self, seq: Sequence, hits: list[CachedBlock]) -> None:
        """`seq` begins with these cached blocks, and holds no others."""
        seq.block_table = [hit.places[self.prefix_cache.blocks] for hit in hits]
        self._pool.share(seq.block_table)
        seq.prefix, seq.num_computed_tokens = hits, len(hits) * self.block_size
        self._holders[seq] = None

    def _num_missing_blocks(self, seq: Sequence) -> int:
        """How many it needs besides those that it holds, for all its tokens to have a slot."""
        return max(0, cdiv(seq.num_tokens, self.block_size) - len(seq.block_table))

    def _shared_block(self, seq: Sequence) -> int | None:
        """The block that its next token goes to, if another sequence holds it too."""
        index = seq.num_computed_tokens // self.block_size
        if index < len(seq.block_table) and self._pool.ref_count(seq.block_table[index]) > 1:
            return seq.block_table[index]
        return None


def cdiv(a: int, b: int) -> int:
    """a / b, rounded up.

    >>> [cdiv(num_tokens, 4) for num_tokens in (0, 1, 4, 5)]
    [0, 1, 1, 2]
    """
    return -(-a // b)
