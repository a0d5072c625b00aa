"""BlockManager: which sequence holds which blocks of the pool. A sequence has as many blocks as its tokens fill.

    block size 4     tokens of A       tokens of B       block tables
                     0  1  2  3  4     0  1  2           A: [3, 0]   token 4 is in block 0, offset 0
                                                         B: [1]      token 2 is in block 1, offset 2
    blocks           0: A4 .. .. ..    1: B0 B1 B2 ..    2: free     3: A0 A1 A2 A3

The idea comes from operating systems: fixed pages, and a page table for each process. No slot is lost between blocks,
and at most block_size - 1 slots of a sequence's last block are empty (Kwon et al. 2023, arXiv:2309.06180).
"""

from itertools import takewhile

from .block_pool import BlockPool
from .host_tier import HostTier
from .kv_cache import BlockCopy, PoolReport
from .observer import Observer
from .prefix_cache import PrefixCacheStats, extend_block_hashes
from .sequence import Sequence


class BlockManager:
    """The block tables of all sequences. allocate() fills a table, append_slot() makes room for one more token."""

    def __init__(
        self, num_blocks: int, block_size: int, enable_caching: bool, tier: HostTier, observer: Observer
    ) -> None:
        self.num_blocks, self.block_size = num_blocks, block_size
        self.tier = tier  # where evicted blocks go, and return from
        self.pool = BlockPool(num_blocks, observer, tier.store)
        self.prefix_cache_stats = PrefixCacheStats()
        self._enable_caching = enable_caching
        self._observer = observer
        self._holders: set[Sequence] = set()
        self._peak = self.report()

    @property
    def num_free_blocks(self) -> int:
        return len(self.pool.free)

    def find_hits(self, seq: Sequence) -> list[int | None]:
        """Return the cached blocks that `seq` begins with. None stands for a block that only the host has.

        The list ends before the first block that is on neither tier. No block in it contains the last token of `seq`,
        which must be computed, because its logits choose the next token. The list is empty if caching is turned off.
        """
        if not self._enable_caching:
            return []
        extend_block_hashes(seq.block_hashes, seq.token_ids, self.block_size)
        hashes = seq.block_hashes[: (seq.num_tokens - 1) // self.block_size]
        cached = takewhile(lambda block_hash: block_hash in self.pool.cached or block_hash in self.tier, hashes)
        return [self.pool.cached.get(block_hash) for block_hash in cached]

    def num_needed(self, seq: Sequence, hits: list[int | None]) -> int:
        """Return how many blocks allocate() takes off the free queue, including hits that nothing holds."""
        num_held = sum(block is not None and self.pool.ref_counts[block] > 0 for block in hits)
        return cdiv(seq.num_tokens, self.block_size) - num_held

    def allocate(self, seq: Sequence, hits: list[int | None]) -> None:
        """Take blocks for all tokens that `seq` has now, beginning with `hits`, which are computed or will be loaded.

        Count the tokens and the hits in prefix_cache_stats, and tell the observer "admit". If all hits are on the
        device, no load is started.
        """
        assert seq not in self._holders, f"request {seq.request_id} holds blocks already"
        on_device = [block for block in hits if block is not None]
        # hold all hits before taking other blocks, which could evict them
        self.pool.touch(on_device)
        held = self.tier.hold([seq.block_hashes[i] for i, block in enumerate(hits) if block is None])
        new = iter(self.pool.get_new_blocks(cdiv(seq.num_tokens, self.block_size) - len(on_device)))
        seq.block_table = [next(new) if block is None else block for block in hits] + list(new)
        seq.num_computed_tokens = len(hits) * self.block_size
        self._holders.add(seq)
        self.prefix_cache_stats.queries += seq.num_tokens
        self.prefix_cache_stats.hits += seq.num_computed_tokens
        self._observer.tell("admit", seq, hits)
        if held:
            self._load(seq, held, [seq.block_table[i] for i, block in enumerate(hits) if block is None])

    def _load(self, seq: Sequence, held: list[int], targets: list[int]) -> None:
        """Start to load `held` blocks of the host to `targets`, and tell the observer "load".

        The load holds its targets, too, until it is collected. They enter the index at once: another sequence may hit
        them, and wait with this one.
        """
        copies = [BlockCopy(*pair) for pair in zip(held, targets, strict=True)]
        self.tier.load(copies)
        self.pool.touch(targets)
        self._observer.tell("load", seq, copies)
        self.cache_blocks(seq, seq.num_computed_tokens)

    def is_ready(self, seq: Sequence) -> bool:
        """Return True if no block of `seq` is still on its way, so that it may run."""
        return self.tier.has_arrived(seq.block_table)

    def collect_loads(self, wait: bool = False) -> None:
        """Free the targets of the loads that have arrived, or of all loads after they have: `wait` for them."""
        self.pool.free_blocks(self.tier.collect(wait))

    def cache_blocks(self, seq: Sequence, num_tokens: int) -> None:
        """Cache the blocks that the last `num_tokens` computed tokens of `seq` have filled, unless caching is off."""
        if not self._enable_caching:
            return
        extend_block_hashes(seq.block_hashes, seq.token_ids, self.block_size)
        end = seq.num_computed_tokens
        for i in range((end - num_tokens) // self.block_size, end // self.block_size):
            self.pool.cache_block(seq.block_table[i], seq.block_hashes[i])

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Let `child` share the blocks that hold the computed tokens of `parent`. Nothing is copied.

        These tokens count as computed by `child`, too, and from now on report() includes the blocks of `child`. Tell
        the observer "fork", with the parent and the child.
        """
        assert child not in self._holders, f"request {child.request_id} holds blocks already"
        child.block_table = parent.block_table[: cdiv(parent.num_computed_tokens, self.block_size)]
        child.num_computed_tokens = parent.num_computed_tokens
        child.block_hashes = parent.block_hashes[: parent.num_computed_tokens // self.block_size]
        self.pool.touch(child.block_table)
        self._holders.add(child)
        self._observer.tell("fork", parent, child)

    def can_append(self, seq: Sequence) -> bool:
        """Return True if append_slot() can succeed: it needs no new block, or one is free."""
        return not (self._needs_block(seq) or self._is_shared(seq)) or self.num_free_blocks > 0

    def append_slot(self, seq: Sequence) -> BlockCopy | None:
        """Make sure that the last token of `seq` has a slot, in a block that no other sequence holds.

        If that takes a new block, tell the observer "grow", with the sequence and the copy. There is a copy if the new
        block replaces a shared one: return it, and the step makes it before it writes. Otherwise, it is None.
        """
        copy = None
        if self._needs_block(seq):
            seq.block_table += self.pool.get_new_blocks(1)
        elif self._is_shared(seq):
            [target] = self.pool.get_new_blocks(1)
            copy = BlockCopy(source=seq.block_table[-1], target=target)
            self.pool.free_blocks([copy.source])  # so its last holder writes in place
            seq.block_table[-1] = target
        else:
            return None
        self._observer.tell("grow", seq, copy)
        return copy

    def free(self, seq: Sequence) -> None:
        """Record the peak, give back all blocks of `seq`, reset num_computed_tokens, and tell the observer "free"."""
        self._peak = self.peak
        self._holders.remove(seq)
        blocks, seq.block_table, seq.num_computed_tokens = seq.block_table, [], 0
        self.pool.free_blocks(blocks)
        self._observer.tell("free", seq, blocks)

    @property
    def peak(self) -> PoolReport:
        """The report with the most slots held so far. free() updates the report before it gives blocks back."""
        if (self.num_blocks - len(self.pool.free)) * self.block_size < self._peak.held:
            return self._peak
        return max(self._peak, self.report(), key=lambda report: (report.held, report.used))

    def report(self) -> PoolReport:
        """Return how much of the pool is promised, held and used now."""
        size = self.block_size
        pieces = {
            (block * size, size, min(max(seq.num_computed_tokens - i * size, 0), size))
            for seq in self._holders
            for i, block in enumerate(seq.block_table)
        }
        promised = sum(cdiv(seq.max_num_tokens, size) for seq in self._holders) * size
        return PoolReport(self.num_blocks * size, promised, pieces=tuple(sorted(pieces)))

    def check_integrity(self) -> None:
        """Raise AssertionError unless all reference counts and the lengths of all block tables are right."""
        arriving = [copy.target for load in self.tier.loads for copy in load.copies]
        self.pool.check_integrity([block for seq in self._holders for block in seq.block_table] + arriving)
        self.tier.check_integrity()
        for seq in self._holders:
            least, most = (cdiv(num, self.block_size) for num in (seq.num_computed_tokens, seq.num_tokens))
            assert least <= len(seq.block_table) <= most, f"{len(seq.block_table)} blocks for {seq.num_tokens} tokens"

    def _needs_block(self, seq: Sequence) -> bool:
        """Return True if all blocks of `seq` are full, and its last token has no slot yet."""
        return seq.num_tokens > len(seq.block_table) * self.block_size

    def _is_shared(self, seq: Sequence) -> bool:
        """Return True if other sequences hold the last block of `seq`, too."""
        return self.pool.ref_counts[seq.block_table[-1]] > 1


def cdiv(a: int, b: int) -> int:
    """Return a / b, rounded up.

    >>> [cdiv(num_tokens, 4) for num_tokens in (0, 1, 4, 5)]
    [0, 1, 1, 2]
    """
    return -(-a // b)
