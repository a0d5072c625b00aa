"""BlockManager: who holds which blocks of the pool. A sequence holds as many as its tokens fill, wherever they lie.

    block size 4     tokens of A       tokens of B       block tables
                     0  1  2  3  4     0  1  2           A: [3, 0]   token 4 is in block 0, offset 0
                                                         B: [1]      token 2 is in block 1, offset 2
    blocks           0: A4 .. .. ..    1: B0 B1 B2 ..    2: free     3: A0 A1 A2 A3

The idea is an operating system's: fixed pages and a table for each process, so that no slot is lost between blocks, and
at most block_size - 1 in a sequence's last one (Kwon et al. 2023, arXiv:2309.06180).
"""

from itertools import takewhile
from typing import NamedTuple

from .block_pool import BlockPool
from .kv_cache import BlockCopy, PoolReport
from .offload import HostKVCache, Load
from .prefix_cache import BlockHash, PrefixCacheStats, extend_block_hashes
from .sequence import Sequence


class Hit(NamedTuple):
    """A cached block, in one of the two tiers."""

    pool: BlockPool
    block: int


class BlockManager:
    """A block table for each sequence: allocate() takes blocks for the tokens there are, append_slot() for one more."""

    def __init__(
        self, num_blocks: int, block_size: int, enable_prefix_caching: bool = False, host: HostKVCache | None = None
    ) -> None:
        self.num_blocks, self.block_size = num_blocks, block_size
        self.prefix_cache_stats = PrefixCacheStats()
        self._is_caching = enable_prefix_caching
        self._pool = BlockPool(num_blocks, on_evict=self._store)
        self._host, self._host_pool = host, BlockPool(host.num_blocks if host else 0)  # the second tier
        self._loads: list[Load] = []  # on their way: each holds its blocks of the host until it has arrived
        self._holders: dict[Sequence, None] = {}  # in order of admission
        self._peak = self.report()

    @property
    def num_free_blocks(self) -> int:
        return self._pool.num_free_blocks

    def can_allocate(self, seq: Sequence, spare: int = 0) -> bool:
        """Whether allocate() would succeed and leave `spare` blocks free."""
        # A hit that nobody holds here is in the queue, or needs a block of the queue: it counts as one that is taken.
        held = [hit for hit in self.find_hits(seq) if hit.pool is self._pool and self._pool.ref_counts[hit.block]]
        return cdiv(seq.num_tokens, self.block_size) - len(held) + spare <= self.num_free_blocks

    def allocate(self, seq: Sequence) -> None:
        """Take blocks for all tokens that `seq` has now: for its beginning the cached ones, which are computed already.

        Counts the tokens asked for, and the tokens hit. What is cached on the host is loaded: is_ready() says when it
        has arrived. Raises NoFreeBlocks if too few are free, or what a copy raises, and then takes none.
        """
        assert seq not in self._holders, f"request {seq.request_id} holds blocks already"
        hits, new = self.find_hits(seq), []
        here = [hit.block for hit in hits if hit.pool is self._pool]
        away = [hit.block for hit in hits if hit.pool is self._host_pool]
        self._pool.touch(here)  # first: or the rest of the prompt would evict what it has just hit,
        self._host_pool.touch(away)  # and what it evicts would take the place of what is to be loaded
        try:
            new = self._pool.get_new_blocks(cdiv(seq.num_tokens, self.block_size) - len(here))
            if away:
                self._loads.append(self._host.load([BlockCopy(*pair) for pair in zip(away, new, strict=False)]))
        except Exception:
            self._pool.free_blocks(here + new)
            self._host_pool.free_blocks(away)
            raise
        fresh = iter(new)
        seq.block_table = [hit.block if hit.pool is self._pool else next(fresh) for hit in hits] + list(fresh)
        seq.num_computed_tokens = len(hits) * self.block_size
        self._holders[seq] = None
        self.cache_blocks(seq, seq.num_computed_tokens)  # others may hit what is on its way, and wait with it
        self.prefix_cache_stats.queries += seq.num_tokens
        self.prefix_cache_stats.hits += seq.num_computed_tokens

    def find_hits(self, seq: Sequence) -> list[Hit]:
        """Return the cached blocks that `seq` begins with; none if the cache is off.

        Its last token is computed in any case: its logits are wanted.
        """
        if not self._is_caching:
            return []
        extend_block_hashes(seq.block_hashes, seq.token_ids, self.block_size)
        hashes = seq.block_hashes[: (seq.num_tokens - 1) // self.block_size]
        return list(takewhile(lambda hit: hit is not None, map(self._find_hit, hashes)))

    def _find_hit(self, block_hash: BlockHash) -> Hit | None:
        """Of a text that is in both tiers the block on the device: it need not be moved."""
        tiers = [(pool, pool.get_cached_block(block_hash)) for pool in (self._pool, self._host_pool)]
        return next((Hit(pool, block) for pool, block in tiers if block is not None), None)

    def _store(self, block: int, block_hash: BlockHash) -> None:
        """A cached block leaves the device: the host keeps its text, as its most recently used, if it has room."""
        known = self._host_pool.get_cached_block(block_hash)
        if known is not None:  # its place is renewed, and nothing is copied
            self._host_pool.touch([known])
            self._host_pool.free_blocks([known])
        elif self._host_pool.num_free_blocks:  # else the host has no block, or all are being loaded
            [target] = self._host_pool.get_new_blocks(1)
            try:
                self._host.store(BlockCopy(block, target))
                self._host_pool.cache_block(target, block_hash)
            finally:
                self._host_pool.free_blocks([target])

    def is_ready(self, seq: Sequence) -> bool:
        """Return True if all blocks of `seq` have arrived: it may run."""
        return all(load.has_arrived() or load.targets.isdisjoint(seq.block_table) for load in self._loads)

    def collect_loads(self, wait: bool = False) -> None:
        """What has arrived may be read, and evicted from the host. `wait`: until all of it has."""
        for load in list(self._loads):
            if wait:
                load.wait()
            if load.has_arrived():
                self._loads.remove(load)
                self._host_pool.free_blocks(load.sources)

    def cache_blocks(self, seq: Sequence, num_tokens: int) -> None:
        """The last `num_tokens` of num_computed_tokens are new: a block that they filled may be hit from now on."""
        if not self._is_caching:
            return
        extend_block_hashes(seq.block_hashes, seq.token_ids, self.block_size)
        end = seq.num_computed_tokens
        for i in range((end - num_tokens) // self.block_size, end // self.block_size):
            self._pool.cache_block(seq.block_table[i], seq.block_hashes[i])

    def reset_prefix_cache(self) -> bool:
        """Forget all texts and counts. Returns False, and changes nothing, while a sequence holds blocks."""
        if self._holders:
            return False
        self._pool.reset_prefix_cache()
        self._host_pool.reset_prefix_cache()
        self.prefix_cache_stats = PrefixCacheStats()
        return True

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """`child` begins with what `parent` has computed: it holds those blocks too, and nothing is copied.

        It is a holder then, and was none before: asserted, "request 7 holds blocks already".
        """
        assert child not in self._holders, f"request {child.request_id} holds blocks already"
        child.block_table = parent.block_table[: cdiv(parent.num_computed_tokens, self.block_size)]
        child.num_computed_tokens = parent.num_computed_tokens
        child.block_hashes = parent.block_hashes[: parent.num_computed_tokens // self.block_size]
        self._pool.touch(child.block_table)
        self._holders[child] = None

    def can_append(self, seq: Sequence) -> bool:
        """Whether append_slot() would succeed."""
        return not (self._needs_block(seq) or self._is_shared(seq)) or self.num_free_blocks > 0

    def append_slot(self, seq: Sequence) -> BlockCopy | None:
        """Make sure of a slot for the last token of `seq` in a block that it alone holds.

        It takes a block if all of its blocks are full, and returns None. It takes one too if others hold its last
        block, and returns the copy to make before anything is written. Raises NoFreeBlocks, and changes nothing, if
        none is free.
        """
        assert seq in self._holders, f"request {seq.request_id} was never allocated"
        if self._needs_block(seq):
            seq.block_table += self._pool.get_new_blocks(1)
        elif self._is_shared(seq):
            [target] = self._pool.get_new_blocks(1)
            source = seq.block_table[-1]
            self._pool.free_blocks([source])  # the last holder will find it alone, and writes in place
            seq.block_table[-1] = target
            return BlockCopy(source, target)
        return None

    def free(self, seq: Sequence) -> None:
        """Give all blocks of `seq` back: it is no holder then, and a block that others hold stays theirs.

        Waits for those that are on their way. The peak is noted before. Raises ValueError, and changes nothing, if it
        is no holder ("request 7 holds no blocks"), or if its table names a block that is not held.
        """
        if seq not in self._holders:
            raise ValueError(f"request {seq.request_id} holds no blocks")
        self.collect_loads(wait=not self.is_ready(seq))  # or others would take a block that is still being written
        self._peak = self.peak
        self._pool.free_blocks(seq.block_table)
        del self._holders[seq]
        seq.block_table = []

    @property
    def peak(self) -> PoolReport:
        """The pool when most of it was held. Less is held only after a free(): it is enough to look before each."""
        is_less = (self.num_blocks - self.num_free_blocks) * self.block_size < self._peak.held
        return self._peak if is_less else max(self._peak, self.report(), key=lambda each: (each.held, each.used))

    def report(self) -> PoolReport:
        """What of the pool is promised, held and used now."""
        seqs = self._holders
        return PoolReport(
            num_blocks=self.num_blocks,
            block_size=self.block_size,
            promised=self.block_size * sum(cdiv(seq.max_num_tokens, self.block_size) for seq in seqs),
            tables=tuple((tuple(seq.block_table), seq.num_computed_tokens) for seq in seqs),
        )

    def check_integrity(self) -> None:
        """Each block is free or in as many tables as its count says, and no table is longer than its tokens need."""
        held = [block for seq in self._holders for block in seq.block_table]
        self._pool.check_integrity(held)
        self._host_pool.check_integrity([block for load in self._loads for block in load.sources])
        assert all(load.targets <= set(held) for load in self._loads), "a block arrives that nobody holds"
        for seq in self._holders:
            assert len(seq.block_table) <= cdiv(seq.num_tokens, self.block_size), f"{seq.num_tokens}: {seq.block_table}"
            assert seq.num_computed_tokens <= len(seq.block_table) * self.block_size

    def _is_shared(self, seq: Sequence) -> bool:
        """Whether others hold its last block too."""
        return self._pool.ref_counts[seq.block_table[-1]] > 1

    def _needs_block(self, seq: Sequence) -> bool:
        """Whether its last token has no slot in the blocks that it holds."""
        return seq.num_tokens > len(seq.block_table) * self.block_size


def cdiv(a: int, b: int) -> int:
    """a / b, rounded up.

    >>> [cdiv(num_tokens, 4) for num_tokens in (0, 1, 4, 5)]
    [0, 1, 1, 2]
    """
    return -(-a // b)
