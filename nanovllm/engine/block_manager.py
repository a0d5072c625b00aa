"""BlockManager: which sequence holds which blocks of the pool. A sequence has as many blocks as its tokens fill.

    block size 4     tokens of A       tokens of B       block tables
                     0  1  2  3  4     0  1  2           A: [3, 0]   token 4 is in block 0, offset 0
                                                         B: [1]      token 2 is in block 1, offset 2
    blocks           0: A4 .. .. ..    1: B0 B1 B2 ..    2: free     3: A0 A1 A2 A3

The idea comes from operating systems: fixed pages, and a page table for each process. No slot is lost between blocks,
and at most block_size - 1 slots of a sequence's last block are empty (Kwon et al. 2023, arXiv:2309.06180).
"""

from collections.abc import Callable
from itertools import takewhile

from .block_pool import BlockPool
from .kv_cache import BlockCopy, PoolReport
from .observer import Observer
from .prefix_cache import BlockHash, PrefixCacheStats, extend_block_hashes
from .sequence import Sequence
from .tier import Tier


class BlockManager:
    """The block tables of all sequences. allocate() fills a table, append_slot() makes room for one more token.

    In place, a table only grows. Any other change makes a new list, so blocks that were read from a list never change.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        enable_caching: bool,
        tier: Tier,
        observer: Observer,
        minimum: Callable[[list[int]], list[int]] = list,
        num_worth_loading: Callable[[list[BlockHash | None]], int] = len,
    ) -> None:
        """Build a manager with all blocks free.

        `minimum` takes a list of numbers, and returns the minimum of each number over all ranks. The default,
        list(), is for one rank. `num_worth_loading` takes a list with the hash of each hit, or None for a hit on the
        device, and returns how many of the hits to use. The default, len(), uses all of them.
        """
        self.num_blocks, self.block_size = num_blocks, block_size
        self.tier = tier  # where evicted blocks go, and return from
        self.pool = BlockPool(num_blocks, observer, tier.store)
        self.prefix_cache_stats = PrefixCacheStats()
        self.broken: set[Sequence] = set()  # they must start over, because they hold a lost block
        self._enable_caching = enable_caching
        self._observer, self._minimum, self._num_worth_loading = observer, minimum, num_worth_loading
        self._holders: set[Sequence] = set()
        self._peak = self.report()

    @property
    def num_free_blocks(self) -> int:
        return len(self.pool.free)

    def find_hits(self, seq: Sequence) -> list[int | None]:
        """Return the cached blocks that `seq` begins with. None stands for a block that only the tier has.

        The list ends before the first block that neither the device nor the tier has. No block in it contains the last
        token of `seq`, which must be computed, because its logits choose the next token. The list is empty if caching
        is turned off. A hit counts only if all ranks have it and loading it is worthwhile. Set
        `seq.num_declined_blocks` to the number of cached blocks that are faster to compute than to load.
        """
        if not self._enable_caching or not seq.may_hit:
            return []
        extend_block_hashes(seq.block_hashes, seq.token_ids, self.block_size, seq.root_hash)
        hashes = seq.block_hashes[: (seq.num_tokens - 1) // self.block_size]
        cached = [*takewhile(lambda block_hash: block_hash in self.pool.cached or block_hash in self.tier, hashes)]
        num_worth = self._num_worth_loading([None if each in self.pool.cached else each for each in cached])
        num_cached, num_hits = self._minimum([len(cached), num_worth])
        seq.num_declined_blocks = num_cached - num_hits
        return [self.pool.cached.get(block_hash) for block_hash in hashes[:num_hits]]

    def num_needed(self, seq: Sequence, hits: list[int | None]) -> int:
        """Return how many blocks allocate() takes off the free queue, including hits that nothing holds."""
        num_held = sum(block is not None and self.pool.ref_counts[block] > 0 for block in hits)
        return cdiv(seq.num_tokens, self.block_size) - num_held

    def allocate(self, seq: Sequence, hits: list[int | None]) -> None:
        """Take blocks for all tokens that `seq` has now, beginning with `hits`, which are computed or will be loaded.

        If too few blocks are free or a copy raises, give all of them back and raise the error.
        """
        assert seq not in self._holders, f"request {seq.request_id} holds blocks already"
        on_device = [block for block in hits if block is not None]
        # hold all hits before taking other blocks, which could evict them
        self.pool.touch(on_device)
        held = self.tier.hold([seq.block_hashes[i] for i, block in enumerate(hits) if block is None])
        taken: list[int] = []
        try:
            taken = self.pool.get_new_blocks(cdiv(seq.num_tokens, self.block_size) - len(on_device))
            copies = [BlockCopy(*pair) for pair in zip(held, taken, strict=False)]  # the first new blocks are targets
            if copies:
                self.tier.load(copies)
        except Exception:
            self.pool.free_blocks(on_device + taken)
            self.tier.release(held)
            raise
        new = iter(taken)  # those between the hits first, then the rest
        seq.block_table = [next(new) if block is None else block for block in hits] + list(new)
        seq.num_computed_tokens = len(hits) * self.block_size
        if seq.num_preemptions == 0:
            seq.num_cached_tokens = seq.num_computed_tokens
        elif seq.num_output_tokens == 0:  # a hit of the first admission may have been lost while it was loading
            seq.num_cached_tokens = min(seq.num_cached_tokens, seq.num_computed_tokens)
        self._holders.add(seq)
        self.prefix_cache_stats.queries += seq.num_tokens
        self.prefix_cache_stats.hits += seq.num_computed_tokens
        self._observer.tell("admit", seq, hits)
        if copies:
            self._hold_targets(seq, copies)

    def _hold_targets(self, seq: Sequence, copies: list[BlockCopy]) -> None:
        """Make the load a second holder of its targets, until collect_loads() removes it. Tell the observer "load".

        The targets are cached immediately, so other sequences can hit them and wait for the same load.
        """
        self.pool.touch([copy.target for copy in copies])
        self._observer.tell("load", seq, copies)
        self._add_to_index(seq, seq.num_computed_tokens)

    def is_ready(self, seq: Sequence) -> bool:
        """Return True if `seq` may run: none of its blocks is still loading, and none was lost."""
        return seq not in self.broken and self.tier.has_arrived(seq.block_table)

    def collect_loads(self, wait: bool = False) -> None:
        """Remove finished loads as holders of their targets. With `wait`, wait for all loads first.

        Lost blocks leave the cache. A sequence that holds a lost block is `broken` until it is preempted, which frees
        all of its blocks: blocks after the lost one may be shared, so the sequence must not compute them again in
        place. Tell the observer "lose" if a block was lost.
        """
        arrived, lost = self.tier.collect(wait)
        if lost:
            for block in lost:
                self.pool.forget(block, "lost")
            self.broken |= {seq for seq in self._holders if not set(lost).isdisjoint(seq.block_table)}
            self._observer.tell("lose", lost)
        self.pool.free_blocks(arrived + lost)

    def cache_blocks(self, seq: Sequence, num_tokens: int) -> None:
        """Cache the blocks that the last `num_tokens` computed tokens of `seq` have filled, unless caching is off.

        The tier may save them, too.
        """
        for i in self._add_to_index(seq, num_tokens):
            is_prompt = (i + 1) * self.block_size <= seq.num_prompt_tokens
            self.tier.save(seq.block_table[i], seq.block_hashes[i], is_prompt)

    def _add_to_index(self, seq: Sequence, num_tokens: int) -> range:
        """Cache the blocks that the last `num_tokens` tokens up to num_computed_tokens fill. The blocks may be loading.

        Return their indices in block_table.
        """
        end = seq.num_computed_tokens
        places = range((end - num_tokens) // self.block_size, end // self.block_size)
        if not places or not self._enable_caching:
            return range(0)
        extend_block_hashes(seq.block_hashes, seq.token_ids, self.block_size, seq.root_hash)
        for i in places:
            self.pool.cache_block(seq.block_table[i], seq.block_hashes[i])
        return places

    def reset_prefix_cache(self) -> bool:
        """Empty the cache, and return True. If a sequence holds blocks, change nothing, and return False."""
        if self._holders:
            return False
        self.collect_loads(wait=True)
        self.pool.reset_prefix_cache()
        self.tier.reset()
        return True

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Let `child` share the blocks that hold the computed tokens of `parent`. Nothing is copied.

        These tokens count as computed by `child`, too, and from now on report() includes the blocks of `child`. Tell
        the observer "fork", with the parent and the child.
        """
        assert child not in self._holders, f"request {child.request_id} holds blocks already"
        parent.ready_until = 0
        child.block_table = parent.block_table[: cdiv(parent.num_computed_tokens, self.block_size)]
        child.num_computed_tokens = parent.num_computed_tokens
        child.block_hashes = parent.block_hashes[: parent.num_computed_tokens // self.block_size]
        self.pool.touch(child.block_table)
        self._holders.add(child)
        self._observer.tell("fork", parent, child)

    def can_append(self, seq: Sequence) -> bool:
        """Return True if append_slot() can succeed: it needs no new block, or one is free."""
        return self._has_slot(seq) or self.num_free_blocks > 0

    def append_slot(self, seq: Sequence) -> BlockCopy | None:
        """Make sure that the last token of `seq` has a slot, in a block that no other sequence holds.

        If that takes a new block, tell the observer "grow", with the sequence and the copy. There is a copy if the new
        block replaces a shared one: return it, and the step makes it before it writes. Otherwise, it is None.
        """
        copy = None
        if not self._has_slot(seq):
            [target] = self.pool.get_new_blocks(1)
            if seq.num_tokens_with_placeholders > len(seq.block_table) * self.block_size:
                seq.block_table.append(target)
            else:
                copy = BlockCopy(source=seq.block_table[-1], target=target)
                self.pool.free_blocks([copy.source])  # so its last holder writes in place
                seq.block_table = [*seq.block_table[:-1], target]
            self._observer.tell("grow", seq, copy)
        if seq.is_plain and seq.num_tokens_with_placeholders > seq.num_prompt_tokens:  # it has been sampled before
            seq.ready_until = min(len(seq.block_table) * self.block_size, seq.max_num_tokens - 1)
        return copy

    def append_draft_slots(self, seq: Sequence, num_tokens: int) -> int:
        """Take blocks for a draft of up to `num_tokens` tokens. Return how many of its tokens have slots.

        It gets no cached block: a hit is worth more than a guess.
        """
        while self.pool.has_uncached_block and len(seq.block_table) * self.block_size < seq.num_tokens + num_tokens:
            seq.block_table += self.pool.get_new_blocks(1)
            self._observer.tell("grow", seq, None)
        return min(num_tokens, len(seq.block_table) * self.block_size - seq.num_tokens)

    def trim(self, seq: Sequence) -> None:
        """Give back the blocks after the last token of `seq`, and tell the observer "trim" if there are any."""
        end = cdiv(seq.num_tokens_with_placeholders, self.block_size)
        if len(seq.block_table) > end:
            seq.block_table, blocks, seq.ready_until = seq.block_table[:end], seq.block_table[end:], 0
            self.pool.free_blocks(blocks)
            self._observer.tell("trim", seq, blocks)

    def free(self, seq: Sequence) -> None:
        """Record the peak, give back all blocks of `seq`, reset num_computed_tokens, and tell the observer "free"."""
        self._peak = self.peak
        self._holders.remove(seq)
        self.broken.discard(seq)
        self.tier.touch(seq.block_hashes)
        blocks, seq.block_table, seq.num_computed_tokens = seq.block_table, [], 0
        seq.forget_launched()
        self.pool.free_blocks(blocks)
        self._observer.tell("free", seq, blocks)

    @property
    def peak(self) -> PoolReport:
        """The first report with the most slots held. free() updates the report before it gives blocks back."""
        num_held = (self.num_blocks - len(self.pool.free)) * self.block_size
        return self._peak if num_held <= self._peak.held else self.report()

    def report(self) -> PoolReport:
        """Return how much of the pool is promised, held and used now."""
        size, num_held = self.block_size, self.num_blocks - len(self.pool.free)
        tables = [(seq.block_table.copy(), seq.num_computed_tokens) for seq in self._holders]
        promised = sum([cdiv(seq.max_num_tokens, size) for seq in self._holders])
        return PoolReport(self.num_blocks * size, num_held * size, promised * size, size, tables)

    def check_integrity(self) -> None:
        """Raise AssertionError unless all reference counts and the lengths of all block tables are right."""
        held = [block for seq in self._holders for block in seq.block_table]
        self.pool.check_integrity(held + self.tier.arriving())
        self.tier.check_integrity()
        assert self.broken <= self._holders, "a sequence without blocks is broken"
        for seq in self._holders:
            lengths = seq.num_launched_tokens, seq.num_tokens_with_placeholders
            low, high = (cdiv(length, self.block_size) for length in lengths)
            assert low <= len(seq.block_table) <= high, f"{len(seq.block_table)} blocks for {seq.num_tokens} tokens"
            if seq.num_tokens_with_placeholders <= seq.ready_until:
                assert self._has_slot(seq) and self.is_ready(seq), f"request {seq.request_id} is not ready"
                assert seq.ready_until <= len(seq.block_table) * self.block_size, "it is ready without blocks"

    def _has_slot(self, seq: Sequence) -> bool:
        """Return True if the last token of `seq` has a slot, in a block that no other sequence holds."""
        table, num_tokens = seq.block_table, seq.num_tokens_with_placeholders
        return num_tokens <= len(table) * self.block_size and self.pool.ref_counts[table[-1]] == 1


def cdiv(a: int, b: int) -> int:
    """Return a / b, rounded up.

    >>> [cdiv(num_tokens, 4) for num_tokens in (0, 1, 4, 5)]
    [0, 1, 1, 2]
    """
    return -(-a // b)
