"""SwappingBlockManager: preempted groups go to the host's pool and come back.

    swap_out   a group's tables move to the host, where the group waits
    swap_in    they come back, to other blocks

What is being copied is not free: blocks of the device are held until they are stored, those of the host until they are
loaded. A sequence with blocks that are still arriving is not ready.
"""

from collections import Counter
from collections.abc import Callable

from .block_manager import BlockManager, cdiv
from .block_pool import BlockPool
from .offload import HostPool, Transfer
from .prefix_cache import PrefixCache
from .sequence import Sequence


class SwappingBlockManager(BlockManager):
    def __init__(self, num_blocks: int, block_size: int, prefix_cache: PrefixCache | None, host_pool: HostPool) -> None:
        """Without a `prefix_cache` nothing is ever cached."""
        super().__init__(num_blocks, block_size, prefix_cache)
        self._host_pool = host_pool
        self._host = BlockPool(host_pool.num_blocks, self.prefix_cache.host_blocks)
        self._arriving: dict[int, Transfer] = {}  # blocks of the device that are being loaded
        self._leaving: list[tuple[Transfer, BlockPool, list[int]]] = []  # blocks that are held until they are copied
        self._swapped: dict[Sequence, None] = {}  # those that have a host_table

    def num_blocks_to_swap(self, group: list[Sequence]) -> int:
        """How many blocks with computed tokens a group holds, those that its members share counted once."""
        return len(self._computed_blocks(group))

    def swap_out(self, group: list[Sequence]) -> None:
        """What the group has computed goes to the host, a shared block once; it holds nothing here any more.

        Its blocks are free once they are copied, which nobody waits for; a copy that is done by now is collected. Those
        of the group that hold no blocks stay as they are. Raises NoFreeBlocks if the host has too few, or whatever the
        copies raise, and then changes nothing.
        """
        to_host, transfer = self._copy(self._host_pool.store, self._computed_blocks(group), self._host)
        for seq in group:
            if seq.block_table:
                seq.host_table = [to_host[block] for block in self._computed_blocks([seq])]
                self._host.share(seq.host_table)
                self._leaving.append((transfer, self._pool, seq.block_table))
                self._swapped[seq] = self._holders.pop(seq)
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

        The host's are free once they are copied, as in swap_out(), and those that have none there stay as they are.
        Raises NoFreeBlocks if there are too few, or whatever the copies raise, and then changes nothing.
        """
        blocks = list(dict.fromkeys(block for seq in group for block in seq.host_table))
        to_device, transfer = self._copy(self._host_pool.load, blocks, self._pool)
        for seq in group:
            if seq.host_table:
                seq.block_table = [to_device[block] for block in seq.host_table]
                self._pool.share(seq.block_table)
                self._holders[seq] = self._swapped.pop(seq)
                self._leaving.append((transfer, self._host, seq.host_table))
                seq.host_table = []
        self._pool.give_back(list(to_device.values()))
        self._arriving |= dict.fromkeys(to_device.values(), transfer)
        self.collect()

    def drop(self, seq: Sequence) -> None:
        """What `seq` has on the host, if anything, is given up."""
        self._host.give_back(seq.host_table)
        self._swapped.pop(seq, None)
        seq.host_table = []

    def has_arrived(self, seq: Sequence) -> bool:
        """Whether nothing that it holds is still being loaded."""
        return self._arriving.keys().isdisjoint(seq.block_table)

    def is_ready(self, seq: Sequence) -> bool:
        """Whether it may run: it holds slots for all its tokens, what is in them is there, and append_slot() was called
        since others held the block that it writes to next, or that was cached.
        """
        if seq.num_tokens > len(seq.block_table) * self.block_size or not self.has_arrived(seq):
            return False
        block = seq.block_table[seq.num_computed_tokens // self.block_size]
        return self._pool.ref_count(block) == 1 and block not in self.prefix_cache.blocks

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

    def free(self, seq: Sequence) -> None:
        """As in BlockManager, once what it holds has arrived: or it would be written after others have taken it."""
        for block in self._arriving.keys() & set(seq.block_table):
            self._arriving[block].wait()
        self.collect()
        super().free(seq)

    def check_integrity(self) -> None:
        """As in BlockManager, of both pools; what is on its way is held at both ends."""
        super().check_integrity()
        away = [block for seq in self._swapped for block in seq.host_table]
        self._host.check_integrity(away + self._left(self._host))
        held = set(self._tables())
        assert held.issuperset(self._arriving), f"{set(self._arriving) - held} are being loaded, and nobody holds them"

    def _tables(self) -> list[int]:
        return super()._tables() + self._left(self._pool)

    def _left(self, pool: BlockPool) -> list[int]:
        """The blocks of a pool that are held until they are copied."""
        return [block for _, owner, blocks in self._leaving if owner is pool for block in blocks]

    def _copy(
        self, copy: Callable[[dict[int, int]], Transfer], sources: list[int], pool: BlockPool
    ) -> tuple[dict[int, int], Transfer]:
        """Begin to copy blocks to others that are taken from `pool`: {source: target}.

        Raises NoFreeBlocks if it has too few, or whatever `copy` raises, and then changes nothing.
        """
        targets = dict(zip(sources, pool.take(len(sources)), strict=True))
        try:
            return targets, copy({target: source for source, target in targets.items()})
        except BaseException:
            pool.give_back(list(targets.values()))
            raise

    def _computed_blocks(self, group: list[Sequence]) -> list[int]:
        """The blocks of a group that have computed tokens in them, each once, in the order of the tables."""
        tables = (seq.block_table[: cdiv(seq.num_computed_tokens, self.block_size)] for seq in group)
        return list(dict.fromkeys(block for table in tables for block in table))
