"""BlockManager: who holds which blocks of the pool. Several sequences may hold one block, until one of them writes.

    block size 4          A has 6 tokens       fork(A, B, 6)          B's next token: append_slot(B) answers 0 -> 1
    block tables          A: [3, 0]            A: [3, 0]              A: [3, 0]
                                               B: [3, 0]              B: [3, 1]
    reference counts      3: 1    0: 1         3: 2    0: 2           3: 2    0: 1    1: 1

The idea is an operating system's: fork() copies the table of a process, not its memory, and a page is copied only when
one of those who share it writes to it (Kwon et al. 2023, arXiv:2309.06180).
"""

from collections import Counter
from itertools import takewhile
from typing import NamedTuple

from .kv_cache import PoolReport
from .offload import HostPool, Transfer
from .prefix_cache import CachedBlock, PrefixCache, PrefixCacheStats, Tier
from .sequence import Sequence, shared_prefix


class NoFreeBlocks(RuntimeError):
    """Fewer blocks are free than are needed."""


class BlockPool:
    """Blocks 0 .. num_blocks - 1, how many hold each, and the list of those that are free. O(1) a block.

    Last in, first out: the block taken next is the one given back last, which may still be in the processor's caches.
    A cached block that nobody holds is idle: it is taken only when no other is left, and may be held again before.
    """

    def __init__(self, num_blocks: int, tier: Tier) -> None:
        self.num_blocks = num_blocks
        self._tier = tier
        self._free = list(range(num_blocks - 1, -1, -1))  # taken from the end: block 0 first
        self._ref_counts = [0] * num_blocks  # 0 for a block that is free

    @property
    def num_free(self) -> int:
        """Those that take() can give, idle ones too."""
        return len(self._free) + self._tier.num_idle

    def take(self, count: int) -> list[int]:
        """Blocks that have from now on one holder, the one given back last comes first.

        Raises NoFreeBlocks, with both numbers, and takes none, if fewer than `count` are free.
        """
        if count > self.num_free:
            raise NoFreeBlocks(f"{count} blocks are needed, {self.num_free} are free")
        start = max(0, len(self._free) - count)
        blocks = self._free[start:]
        del self._free[start:]
        blocks.reverse()
        blocks += [self._tier.evict() for _ in range(count - len(blocks))]
        for block in blocks:
            self._ref_counts[block] = 1
        return blocks

    def share(self, blocks: list[int]) -> None:
        """Each has one holder more. Raises ValueError, and changes nothing, if one of them is free and not idle."""
        free = [block for block in blocks if not self._ref_counts[block] and block not in self._tier]
        if free:
            raise ValueError(f"block {free[0]} is shared, and nobody holds it")
        for block in blocks:
            self._tier.set_busy(block)
            self._ref_counts[block] += 1

    def give_back(self, blocks: list[int]) -> None:
        """Each has one holder less. Of those that have none any more the first will be the next one taken.

        Cached ones become idle, the last of them first: so the end of a text is evicted before its beginning.
        Raises ValueError, and gives none back, if there are more of a block than it has holders.
        """
        counts, freed = self._ref_counts, []
        for i, block in enumerate(blocks):
            if not counts[block]:
                for given in blocks[:i]:
                    counts[given] += 1
                raise ValueError(f"block {block} is given back twice")
            counts[block] -= 1
            if not counts[block]:
                freed.append(block)
        for block in reversed(freed):
            if block in self._tier:
                self._tier.set_idle(block)
            else:
                self._free.append(block)

    def forget_all(self) -> None:
        """Nothing is cached any more: what was idle is free."""
        self._free += self._tier.clear()

    def ref_count(self, block: int) -> int:
        """How many hold it."""
        return self._ref_counts[block]

    def check_integrity(self, tables: list[int]) -> None:
        """A block has as many holders as there are tables that name it; those that have none are free or idle.

        `tables`: all block tables end to end.
        """
        holders = Counter(tables)
        counted = [holders[block] for block in range(self.num_blocks)]
        assert self._ref_counts == counted, f"reference counts {self._ref_counts}, in the tables {counted}"
        unheld = [block for block in range(self.num_blocks) if not holders[block]]
        places = sorted([*self._free, *self._tier.check_integrity()])
        assert places == unheld, f"free or idle are {places}, in no table are {unheld}"
        assert not [block for block in self._free if block in self._tier], "a free block is cached"


class BlockCopy(NamedTuple):
    """What is in block `source` must be in `target` too, before the next step writes."""

    source: int
    target: int


class BlockManager:
    """A block table for each sequence. Only a sequence that holds a block alone may write to it."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        prefix_cache: PrefixCache | None = None,
        host_pool: HostPool | None = None,
    ) -> None:
        """Without a `prefix_cache` nothing is ever cached, without a `host_pool` nothing leaves the device."""
        self.num_blocks, self.block_size = num_blocks, block_size
        self.prefix_cache = prefix_cache or PrefixCache(block_size)
        self._is_caching = prefix_cache is not None
        self._pool = BlockPool(num_blocks, self.prefix_cache.device)
        self._host_pool = host_pool
        self._host = BlockPool(host_pool.num_blocks if host_pool else 0, self.prefix_cache.host)
        self._arriving: dict[int, Transfer] = {}  # blocks of the device that are being loaded
        self._leaving: list[tuple[Transfer, BlockPool, list[int]]] = []  # blocks that are held until they are copied
        if host_pool:
            self.prefix_cache.device.on_evict = self._save
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
        self.prefix_cache.count(seq.num_tokens, seq.num_computed_tokens)
        if seq.num_cached_tokens is None:
            seq.num_cached_tokens = seq.num_computed_tokens

    def fork(self, parent: Sequence, child: Sequence, num_tokens: int) -> None:
        """`child` begins with the parent's first `num_tokens` tokens: it holds their blocks too, and nothing is copied.

        They count as computed for the child. If more of its own beginning is cached, it holds that instead. Raises
        ValueError, and changes nothing, if the parent has not computed as many.
        """
        if parent.num_computed_tokens < num_tokens:
            raise ValueError(f"{num_tokens} tokens to share, {parent.num_computed_tokens} are computed")
        assert child not in self._holders, f"request {child.request_id} holds blocks already"
        hits = list(takewhile(lambda hit: self.prefix_cache.device in hit.places, self._hits(child)))
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

        If the block that it writes to next is shared, a new one takes its place in the table, and the answer is the
        copy to make. If it is cached, it is so no more. Raises NoFreeBlocks, and changes nothing, if too few blocks are
        free.
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
            self.prefix_cache.device.forget(seq.block_table[seq.num_computed_tokens // self.block_size])
        seq.block_table += new
        return copy

    def free(self, seq: Sequence) -> None:
        """`seq` holds its blocks no more: its table is then empty. Raises ValueError if it holds none."""
        if seq not in self._holders:
            raise ValueError(f"request {seq.request_id} holds no blocks")
        for block in self._arriving.keys() & set(seq.block_table):
            self._arriving[block].wait()  # or it would be written after somebody else has taken it
        self._pool.give_back(seq.block_table)
        del self._holders[seq]
        seq.block_table, seq.prefix = [], []

    def num_blocks_to_swap(self, group: list[Sequence]) -> int:
        """How many blocks with computed tokens a group holds, those that its members share counted once."""
        return len(self._computed_blocks(group))

    def swap_out(self, group: list[Sequence]) -> None:
        """What the group has computed goes to the host, a shared block once; it holds nothing here any more.

        Its blocks are free once they are copied. Raises NoFreeBlocks if the host has too few, or whatever the copies
        raise, and then changes nothing.
        """
        assert self._host_pool is not None, "there is no host pool"
        blocks = self._computed_blocks(group)
        to_host = dict(zip(blocks, self._host.take(len(blocks)), strict=True))
        try:
            transfer = self._host_pool.store({host: block for block, host in to_host.items()})
        except BaseException:
            self._host.give_back(list(to_host.values()))
            raise
        for seq in group:
            if seq.block_table:
                num_computed = cdiv(seq.num_computed_tokens, self.block_size)
                seq.host_table = [to_host[block] for block in seq.block_table[:num_computed]]
                self._host.share(seq.host_table)
                self._leaving.append((transfer, self._pool, seq.block_table))
                del self._holders[seq]
                seq.block_table, seq.prefix = [], []
        self._host.give_back(list(to_host.values()))
        self.collect()

    def can_swap_in(self, group: list[Sequence], spare: int = 0) -> bool:
        """Whether there is room for the group's blocks and its next tokens, with `spare` blocks left."""
        blocks = Counter(block for seq in group for block in seq.host_table)
        num_new = sum(cdiv(seq.num_tokens, self.block_size) - len(seq.host_table) for seq in group if seq.host_table)
        next_blocks = [seq.host_table[seq.num_computed_tokens // self.block_size :] for seq in group]
        num_copies = sum(blocks[table[0]] > 1 for table in next_blocks if table)  # one too many for each block: no harm
        return len(blocks) + num_new + num_copies + spare <= self.num_free_blocks

    def swap_in(self, group: list[Sequence]) -> None:
        """The group holds blocks of the device again, and shares what it shared. See is_ready().

        Raises NoFreeBlocks if there are too few, or whatever the copies raise, and then changes nothing.
        """
        assert self._host_pool is not None, "there is no host pool"
        blocks = list(dict.fromkeys(block for seq in group for block in seq.host_table))
        to_device = dict(zip(blocks, self._pool.take(len(blocks)), strict=True))
        try:
            transfer = self._host_pool.load({block: host for host, block in to_device.items()})
        except BaseException:
            self._pool.give_back(list(to_device.values()))
            raise
        for seq in group:
            if seq.host_table:
                seq.block_table = [to_device[block] for block in seq.host_table]
                self._pool.share(seq.block_table)
                self._holders[seq] = None
                self._leaving.append((transfer, self._host, seq.host_table))
                seq.host_table = []
        self._pool.give_back(list(to_device.values()))
        self._arriving |= dict.fromkeys(to_device.values(), transfer)
        self.collect()

    def drop(self, seq: Sequence) -> None:
        """What `seq` has on the host, if anything, is given up."""
        self._host.give_back(seq.host_table)
        seq.host_table = []

    def has_arrived(self, seq: Sequence) -> bool:
        """Whether nothing that it holds is still being loaded."""
        return self._arriving.keys().isdisjoint(seq.block_table)

    def is_ready(self, seq: Sequence) -> bool:
        """Whether it may run: it holds slots for all its tokens, and what is in them is there."""
        return seq.num_tokens <= len(seq.block_table) * self.block_size and self.has_arrived(seq)

    @property
    def is_copying(self) -> bool:
        return bool(self._leaving or self._arriving)

    @property
    def is_storing(self) -> bool:
        """Whether blocks of the device will be free as soon as they are copied."""
        return any(pool is self._pool for _, pool, _ in self._leaving)

    def collect(self, wait: bool = False) -> None:
        """Look which copies are done: what they held is given back. `wait`: until all are."""
        if wait:
            for transfer in [*(transfer for transfer, _, _ in self._leaving), *self._arriving.values()]:
                transfer.wait()
        leaving, self._leaving = self._leaving, []
        for transfer, pool, blocks in leaving:
            if transfer.is_done():
                pool.give_back(blocks)
            else:
                self._leaving.append((transfer, pool, blocks))
        self._arriving = {block: transfer for block, transfer in self._arriving.items() if not transfer.is_done()}

    def reset_prefix_cache(self) -> bool:
        """Forget all that is cached, and the statistics. False, and nothing happens, while somebody holds blocks."""
        if self._holders or self.is_copying:
            return False
        self._pool.forget_all()
        self._host.forget_all()
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
        leaving = [block for _, pool, blocks in self._leaving if pool is self._pool for block in blocks]
        self._pool.check_integrity([block for seq in self._holders for block in seq.block_table] + leaving)
        for seq in self._holders:
            assert len(set(seq.block_table)) == len(seq.block_table), f"a block is twice in {seq.block_table}"
            most = cdiv(seq.num_tokens, self.block_size)
            assert len(seq.block_table) <= most, f"{len(seq.block_table)} blocks for {seq.num_tokens} tokens"
            assert seq.num_computed_tokens <= len(seq.block_table) * self.block_size

    def _num_blocks_to_take(self, *group: Sequence) -> int:
        """Blocks of a group that are free now: all but those that it hits and others hold."""
        here = [hit.places.get(self.prefix_cache.device) for hit in self._hits(group[0])]
        num_held = sum(block is not None and self._pool.ref_count(block) > 0 for block in here)
        return self.num_blocks_for(*group) - num_held

    def _hits(self, seq: Sequence) -> list[CachedBlock]:
        """The beginning of `seq` that is cached, in whole blocks; its last token is to be computed in any case."""
        may_hit = self._is_caching and not seq.awaits_prompt_logprobs
        most = (seq.num_tokens - 1) // self.block_size if may_hit else 0
        self.prefix_cache.extend_hashes(seq.block_hashes, seq.token_ids, most)
        return self.prefix_cache.match(seq.block_hashes[:most], seq.token_ids)

    def _hold(self, seq: Sequence, hits: list[CachedBlock]) -> None:
        """`seq` begins with these cached blocks, and holds no others. Those that are on the host only are loaded."""
        device = self.prefix_cache.device
        here = [hit.places[device] for hit in hits if device in hit.places]
        self._pool.share(here)
        away = [hit for hit in hits if device not in hit.places]
        device.num_hits += len(here)
        self.prefix_cache.host.num_hits += len(away)
        if away and not self._restore(away):
            num_found = hits.index(away[0])
            self._pool.give_back(here[num_found:])
            hits = hits[:num_found]
        seq.block_table = [hit.places[device] for hit in hits]
        seq.prefix, seq.num_computed_tokens = hits, len(hits) * self.block_size
        self._holders[seq] = None

    def _restore(self, texts: list[CachedBlock]) -> bool:
        """Load texts that are on the host only, into blocks that are held once. False if it fails: nothing changes."""
        assert self._host_pool is not None, "there is no host pool"
        sources = [text.places[self.prefix_cache.host] for text in texts]
        self._host.share(sources)
        blocks = self._pool.take(len(texts))
        try:
            transfer = self._host_pool.load(dict(zip(blocks, sources, strict=True)))
        except RuntimeError:
            self._pool.give_back(blocks)
            self._host.give_back(sources)
            return False
        for text, block in zip(texts, blocks, strict=True):
            self.prefix_cache.device.add(text, block)
        self._leaving.append((transfer, self._host, sources))
        self._arriving |= dict.fromkeys(blocks, transfer)
        self.collect()
        return True

    def _save(self, text: CachedBlock) -> None:
        """A text is about to leave the device: the host keeps it, if it does not have it and there is room."""
        if self._host_pool is None or self.prefix_cache.host in text.places or not self._host.num_free:
            return
        [block] = self._host.take(1)
        try:
            transfer = self._host_pool.store({block: text.places[self.prefix_cache.device]})
        except RuntimeError:
            self._host.give_back([block])
            return
        transfer.hold_back_compute()  # the device's block is about to be written
        self.prefix_cache.host.add(text, block)
        self._leaving.append((transfer, self._host, [block]))
        self.collect()

    def _computed_blocks(self, group: list[Sequence]) -> list[int]:
        tables = (seq.block_table[: cdiv(seq.num_computed_tokens, self.block_size)] for seq in group)
        return list(dict.fromkeys(block for table in tables for block in table))

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
