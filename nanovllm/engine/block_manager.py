"""BlockManager: which blocks each sequence holds: as many as its tokens fill, wherever they are.

    block size 4     tokens of A       tokens of B       block tables
                     0  1  2  3  4     0  1  2           A: [3, 0]   token 4 is in block 0, offset 0
                                                         B: [1]      token 2 is in block 1, offset 2
    blocks           0: A4 .. .. ..    1: B0 B1 B2 ..    2: free     3: A0 A1 A2 A3

The idea comes from operating systems: pages of one size, and a page table per process. No slot is lost between blocks,
and at most block_size - 1 in the last block of a sequence (PagedAttention, Kwon et al. 2023, arXiv:2309.06180).
"""

from .block_pool import BlockPool, NoFreeBlocks
from .kv_cache import BlockCopy, PoolReport
from .observer import Observer
from .prefix_cache import BlockHash, PrefixCacheStats, extend_block_hashes
from .sequence import Sequence
from .tier import Tier


class BlockManager:
    """A block table for each sequence. allocate() takes blocks for its tokens so far, append_slot() for one more."""

    def __init__(self, num_blocks: int, block_size: int, enable_caching: bool, tier: Tier, observer: Observer) -> None:
        """Start with all blocks free. `tier` is where evicted blocks go, and come back from."""
        self.num_blocks, self.block_size = num_blocks, block_size
        self.pool = BlockPool(num_blocks, on_evict=self._evict)
        self.tier = tier
        self.prefix_cache_stats = PrefixCacheStats()
        self._enable_caching = enable_caching
        self._observer = observer
        self._holders: dict[Sequence, None] = {}  # sequences that hold blocks, in order of admission
        self._peak = self.report()

    @property
    def num_free_blocks(self) -> int:
        return self.pool.num_free_blocks

    def find_hits(self, seq: Sequence) -> list[int | None]:
        """Return the cached blocks that `seq` begins with: None stands for a block that only the tier has.

        The last token is never part of a hit: it must be computed, since its logits choose the next token.
        """
        if not self._enable_caching or not seq.may_hit:
            return []
        extend_block_hashes(seq.block_hashes, seq.token_ids, self.block_size)
        hits: list[int | None] = []
        for block_hash in seq.block_hashes[: (seq.num_tokens - 1) // self.block_size]:
            if block_hash not in self.pool.cached and block_hash not in self.tier:
                break
            hits.append(self.pool.cached.get(block_hash))
        return hits

    def num_needed(self, seq: Sequence, hits: list[int | None]) -> int:
        """Return how many free blocks allocate() would take. A hit that nobody holds is one of them."""
        num_held = sum(block is not None and self.pool.ref_counts[block] > 0 for block in hits)
        return cdiv(seq.num_tokens, self.block_size) - num_held

    def allocate(self, seq: Sequence, hits: list[int | None]) -> None:
        """Take blocks for all tokens of `seq`. The tokens of `hits` count as computed: is_ready() says when they are.

        Raise NoFreeBlocks if too few are free, or what a copy raises, and then take none.
        """
        assert seq not in self._holders, f"request {seq.request_id} holds blocks already"
        if (needed := self.num_needed(seq, hits)) > self.num_free_blocks:
            raise NoFreeBlocks(f"{needed} blocks are needed, {self.num_free_blocks} are free")
        cached = [block for block in hits if block is not None]
        self.pool.touch(cached)  # before new blocks are taken: they might evict these,
        held = self.tier.hold([seq.block_hashes[i] for i, block in enumerate(hits) if block is None])  # or these
        new: list[int] = []
        try:
            new = self.pool.get_new_blocks(cdiv(seq.num_tokens, self.block_size) - len(cached))
            targets = new[: len(held)]
            if held:
                self.tier.load(held, targets)
        except Exception:
            self.pool.free_blocks(cached + new)
            self.tier.release(held)
            raise
        self.pool.touch(targets)  # until they have arrived, the load is a holder of its targets too
        fresh = iter(new)
        seq.block_table = [next(fresh) if block is None else block for block in hits] + list(fresh)
        seq.num_computed_tokens = len(hits) * self.block_size
        if seq.num_preemptions == 0:
            seq.num_cached_tokens = seq.num_computed_tokens
        self._holders[seq] = None
        self._observer.tell("admit", seq, hits)
        if held:
            self._observer.tell("load", seq, [BlockCopy(*pair) for pair in zip(held, targets, strict=True)])
        self.cache_blocks(seq, seq.num_computed_tokens)  # others may hit what is on its way, and wait for it too
        self.prefix_cache_stats.queries += seq.num_tokens
        self.prefix_cache_stats.hits += seq.num_computed_tokens

    def is_ready(self, seq: Sequence) -> bool:
        """Return whether all blocks of `seq` have arrived, so that it may run."""
        return self.tier.has_arrived(seq.block_table)

    def collect_loads(self, wait: bool = False) -> None:
        """Finish the loads that have arrived. `wait` for all of them."""
        self.pool.free_blocks(self.tier.collect(wait))

    def cache_blocks(self, seq: Sequence, num_tokens: int) -> None:
        """Add the blocks to the index that the last `num_tokens` computed tokens have filled."""
        if not self._enable_caching:
            return
        extend_block_hashes(seq.block_hashes, seq.token_ids, self.block_size)
        end = seq.num_computed_tokens
        for i in range((end - num_tokens) // self.block_size, end // self.block_size):
            if self.pool.cache_block(seq.block_table[i], seq.block_hashes[i]):
                self._observer.tell("cache", seq.block_table[i], seq.block_hashes[i])

    def _evict(self, block: int, block_hash: BlockHash) -> None:
        """Hand a cached block to the tier, right before it is reused."""
        self.tier.store(block, block_hash)
        self._observer.tell("evict", block, block_hash, "taken")

    def reset_prefix_cache(self) -> bool:
        """Empty the cache; its statistics go on. Return False, and change nothing, while a sequence holds blocks."""
        if self._holders:
            return False
        self.collect_loads(wait=True)
        for block_hash, block in self.pool.cached.items():
            self._observer.tell("evict", block, block_hash, "reset")
        self.pool.reset_prefix_cache()
        self.tier.reset()
        return True

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Let `child` hold what `parent` has computed, in the same blocks: nothing is copied."""
        assert child not in self._holders, f"request {child.request_id} holds blocks already"
        child.block_table = parent.block_table[: cdiv(parent.num_computed_tokens, self.block_size)]
        child.num_computed_tokens = parent.num_computed_tokens
        child.block_hashes = parent.block_hashes[: parent.num_computed_tokens // self.block_size]
        self.pool.touch(child.block_table)
        self._holders[child] = None
        self._observer.tell("fork", parent, child)

    def can_append(self, seq: Sequence) -> bool:
        """Return whether append_slot() would succeed."""
        return self.num_free_blocks > 0 or not (self._needs_block(seq) or self._is_shared(seq))

    def append_slot(self, seq: Sequence) -> BlockCopy | None:
        """Make sure that the last token of `seq` has a slot, in a block that no other sequence holds.

        Take a block if all blocks of `seq` are full. If others hold its last block too, take a block in its place, and
        return the copy to make before the next step writes. Raise NoFreeBlocks, and change nothing, if none is free.
        """
        copy = None
        if self._needs_block(seq):
            seq.block_table += self.pool.get_new_blocks(1)
        elif self._is_shared(seq):
            [target] = self.pool.get_new_blocks(1)
            copy = BlockCopy(seq.block_table[-1], target)
            self.pool.free_blocks([copy.source])  # its last holder will find it unshared, and writes in place
            seq.block_table[-1] = target
        else:
            return None
        self._observer.tell("grow", seq, copy)
        return copy

    def free(self, seq: Sequence) -> None:
        """Give up all blocks of `seq`. Raise ValueError, and change nothing, if it holds none."""
        if seq not in self._holders:
            raise ValueError(f"request {seq.request_id} holds no blocks")
        self._peak = self.peak
        self.pool.free_blocks(seq.block_table)
        del self._holders[seq]
        blocks, seq.block_table, seq.num_computed_tokens = seq.block_table, [], 0
        self._observer.tell("free", seq, blocks)

    @property
    def peak(self) -> PoolReport:
        """The report with the most slots held so far. Only free() lowers that number, and it looks here first."""
        if (self.num_blocks - self.num_free_blocks) * self.block_size < self._peak.held:
            return self._peak
        return max(self._peak, self.report(), key=lambda report: (report.held, report.used))

    def report(self) -> PoolReport:
        """Return what is promised, held and used now."""
        return PoolReport(
            num_blocks=self.num_blocks,
            block_size=self.block_size,
            promised=self.block_size * sum(cdiv(seq.max_num_tokens, self.block_size) for seq in self._holders),
            tables=tuple((tuple(seq.block_table), seq.num_computed_tokens) for seq in self._holders),
        )

    def check_integrity(self) -> None:
        """Assert that each block is free, or held as often as counted, and that no table is longer than needed."""
        held = [block for seq in self._holders for block in seq.block_table]
        self.pool.check_integrity(held + self.tier.arriving())
        self.tier.check_integrity()
        for seq in self._holders:
            assert len(seq.block_table) <= cdiv(seq.num_tokens, self.block_size), f"{seq.num_tokens}: {seq.block_table}"
            assert seq.num_computed_tokens <= len(seq.block_table) * self.block_size

    def _needs_block(self, seq: Sequence) -> bool:
        """Return whether the last token of `seq` has no slot yet."""
        return seq.num_tokens > len(seq.block_table) * self.block_size

    def _is_shared(self, seq: Sequence) -> bool:
        """Return whether others hold the last block of `seq` too."""
        return self.pool.ref_counts[seq.block_table[-1]] > 1


def cdiv(a: int, b: int) -> int:
    """Return a / b, rounded up.

    >>> [cdiv(num_tokens, 4) for num_tokens in (0, 1, 4, 5)]
    [0, 1, 1, 2]
    """
    return -(-a // b)
