"""Two tiers with real bytes and slow loads, for tests of the host tier.

The keys and values of a token are numbers made from all tokens up to it, so leftovers of another text are noticed.
"""

from collections.abc import Callable
from functools import lru_cache
from zlib import crc32

import torch
from torch import Tensor

from ...engine.block_pool import BlockPool
from ...engine.kv_cache import BlockCopy
from ...engine.observer import Observer
from ...engine.prefix_cache import BlockHash, extend_block_hashes
from ...engine.sequence import Sequence
from ...tiers.host_tier import HostTier
from .pools import BLOCK_SIZE, make_cache
from .sequences import admit, holders, make_manager, make_sequence

NUM_LAYERS = 3


class CopyFailed(Exception):
    pass


class SlowEvent:
    """The event of a load that arrives on `tier.arrives()` or on a wait. Until then, its target holds NaN."""

    def __init__(self, tier: "SlowHostTier", copies: list[BlockCopy]) -> None:
        self._tier, self._copies, self._is_here, self._num_asked = tier, copies, False, 0
        tier.device_blocks[[copy.target for copy in copies]] = float("nan")

    def query(self) -> bool:
        self._num_asked += 1
        assert self._num_asked < 5_000, "it is polled forever, and nothing waits"
        if not self._is_here and self._tier.arrives():
            self.synchronize()
        return self._is_here

    def synchronize(self) -> None:
        if not self._is_here:
            for source, target in self._copies:
                self._tier.device_blocks[target] = self._tier.blocks[source]
        self._is_here = True


class SlowHostTier(HostTier):
    """A tier whose loads arrive on `arrives()` and whose copies raise on `fails()`. By default, neither happens."""

    def __init__(self, device_blocks: Tensor, num_blocks: int, observer: Observer) -> None:
        super().__init__(device_blocks, num_blocks, observer)
        self.device_blocks = device_blocks
        self.arrives: Callable[[], bool] = lambda: True
        self.fails: Callable[[], bool] = lambda: False

    def store(self, block: int, block_hash: BlockHash) -> None:
        if self.fails() and block_hash not in self and len(self.pool.free):
            raise CopyFailed("a store")
        super().store(block, block_hash)

    def load(self, copies: list[BlockCopy]) -> None:
        if self.fails():
            raise CopyFailed("a load")
        super().load(copies)
        [*_, load] = self.loads
        load.event = SlowEvent(self, load.copies)


class Tiers:
    """A BlockManager over two pools, used as by an engine. Blocks have 4 slots."""

    def __init__(
        self,
        num_blocks: int = 4,
        num_host_blocks: int = 8,
        is_caching: bool = True,
        tier: type[SlowHostTier] = SlowHostTier,
    ) -> None:
        self.kv_cache = make_cache(num_blocks, num_layers=NUM_LAYERS)
        self.host = tier(self.kv_cache.blocks, num_host_blocks, Observer())
        self.manager = make_manager(num_blocks, BLOCK_SIZE, is_caching, self.host)
        self.pools: tuple[BlockPool, BlockPool] = (self.manager.pool, self.host.pool)

    @property
    def num_free(self) -> tuple[int, int]:
        """The free blocks on the device and on the host."""
        device, host = self.pools
        return len(device.free), len(host.free)

    @property
    def moved(self) -> tuple[int, int]:
        """The numbers of stored and loaded blocks."""
        return self.host.num_blocks_stored, self.host.num_blocks_loaded

    def sequence(self, token_ids: list[int], name: str = "a") -> Sequence:
        seq = make_sequence(name, len(token_ids), 40)
        seq.token_ids = list(token_ids)
        return seq

    def admitted(self, token_ids: list[int], name: str = "a") -> Sequence:
        """Return a sequence that holds its blocks, some of which may still be loading."""
        seq = self.sequence(token_ids, name)
        admit(self.manager, seq)
        self.manager.check_integrity()
        return seq

    def left(self, token_ids: list[int]) -> None:
        """Run this sequence from its arrival to its end."""
        seq = self.admitted(token_ids)
        self.compute(seq)
        self.manager.free(seq)
        self.manager.check_integrity()

    def evict(self) -> None:
        """Take all free blocks of the device, write to them, and free them."""
        blocks = self.manager.pool.get_new_blocks(self.num_free[0])
        self.kv_cache.blocks[blocks] = float("nan")
        self.manager.pool.free_blocks(blocks)
        self.manager.check_integrity()

    def compute(self, seq: Sequence, num_tokens: int | None = None) -> None:
        """Compute this many tokens of a sequence, or all, in blocks that it holds alone."""
        start = seq.num_computed_tokens
        end = seq.num_tokens if num_tokens is None else start + num_tokens
        for position in range(start, end):
            block = seq.block_table[position // BLOCK_SIZE]
            assert self.manager.pool.ref_counts[block] == 1, "only the sole holder writes to a block"
            assert block not in self.manager.pool.hashes, "a cached block is never written"
            self.kv_cache.blocks[block, :, :, position % BLOCK_SIZE] = keys_and_values(seq.token_ids, position)
        seq.num_computed_tokens = end
        self.manager.cache_blocks(seq, end - start)

    def assert_bytes(self, *seqs: Sequence) -> None:
        """Assert that all computed tokens have their bytes, in every layer."""
        for seq in seqs:
            assert seq.num_computed_tokens, "there is nothing to compare"
            for position in range(seq.num_computed_tokens):
                block, offset = seq.block_table[position // BLOCK_SIZE], position % BLOCK_SIZE
                expected = keys_and_values(seq.token_ids, position)
                assert torch.equal(self.kv_cache.blocks[block, :, :, offset], expected), f"token {position} is lost"

    def places(self, token_ids: list[int]) -> str:
        """Return where each full block of a text is: d for the device, h for the host, b for both, - for neither."""
        hashes: list[bytes] = []
        extend_block_hashes(hashes, token_ids, BLOCK_SIZE)
        names = {(True, False): "d", (False, True): "h", (True, True): "b", (False, False): "-"}
        device, host = self.pools
        return "".join(names[each in device.cached, each in host.cached] for each in hashes)

    def state(self) -> tuple:
        """Return everything that a failed allocation must not change. The order of the queue may change."""
        tables = [(seq.request_id, list(seq.block_table)) for seq in holders(self.manager)]
        pools = [(set(pool.free), list(pool.ref_counts)) for pool in self.pools]
        return pools, tables, self.manager.report(), list(self.host.loads), self.manager.prefix_cache_stats

    def assert_empty(self) -> None:
        """Assert that every block is free on both tiers, and nothing is loading."""
        self.manager.check_integrity()
        assert self.num_free == tuple(pool.num_blocks for pool in self.pools)
        assert not self.host.loads and not holders(self.manager)


def keys_and_values(token_ids: list[int], position: int) -> Tensor:
    """Return the keys and values of a token, which depend on all before it: [num_layers, 2, num_kv_heads, head_dim]."""
    return numbers_of(tuple(token_ids[: position + 1]))


@lru_cache(maxsize=4096)
def numbers_of(token_ids: tuple[int, ...]) -> Tensor:
    generator = torch.Generator().manual_seed(crc32(repr(token_ids).encode()))
    return torch.randn(NUM_LAYERS, 2, 2, 8, generator=generator)
