"""Two tiers with bytes in them, and copies that are late: what the tests of swaps and of evicted texts share.

The keys and values of a token are numbers made from all tokens up to it, so what another text left behind is seen.
"""

from collections.abc import Callable
from functools import lru_cache, partial
from zlib import crc32

import torch
from torch import Tensor

from ..block_manager import cdiv
from ..offload import HostPool, Traffic, Transfer
from ..prefix_cache import PrefixCache
from ..sequence import Sequence
from ..tiered_block_manager import TieredBlockManager
from .helpers import make_sequence
from .pool import BLOCK_SIZE, make_cache

NUM_LAYERS = 3


class LateTransfer(Transfer):
    """Copies that are made when somebody waits for them, or lets them be done. As on a device's streams, those that
    were begun before are made first; but what is computed in the meantime does not wait for them.
    """

    def __init__(self, pool: "LateHostPool", copy: Callable[[], Transfer]) -> None:
        super().__init__(Traffic())
        self._begun, self._copy = pool.begun, copy

    def is_done(self) -> bool:
        return self not in self._begun

    def wait(self) -> None:
        while not self.is_done():
            self._begun.pop(0)._copy()

    def hold_back_compute(self) -> None:
        self.wait()


class LateHostPool(HostPool):
    """`is_late()` and `fails()` are asked for each transfer."""

    def __init__(self, device_blocks: Tensor, num_blocks: int) -> None:
        super().__init__(device_blocks, num_blocks)
        self.begun: list[LateTransfer] = []  # and not done
        self.is_late: Callable[[], bool] = lambda: False
        self.fails: Callable[[], bool] = lambda: False

    def finish(self) -> None:
        """All that was begun is done."""
        if self.begun:
            self.begun[-1].wait()

    def _copy(self, *what) -> Transfer:
        if self.fails():
            raise RuntimeError("the copy failed")
        self.begun.append(LateTransfer(self, partial(super()._copy, *what)))
        transfer = self.begun[-1]
        if not self.is_late():
            transfer.wait()
        return transfer


class Tiers:
    """A TieredBlockManager over two pools of so many blocks, and what an engine does with it."""

    def __init__(self, num_blocks: int = 8, num_host_blocks: int = 8, is_caching: bool = False) -> None:
        self.kv_cache = make_cache(num_blocks, num_layers=NUM_LAYERS)
        self.host_pool = LateHostPool(self.kv_cache.blocks, num_host_blocks)
        cache = PrefixCache(BLOCK_SIZE) if is_caching else None
        self.manager = TieredBlockManager(num_blocks, BLOCK_SIZE, cache, self.host_pool)

    @property
    def num_free(self) -> tuple[int, int]:
        """On the device and on the host."""
        return self.manager.num_free_blocks, self.manager._host.num_free

    def sequence(self, token_ids: list[int], name: str = "a", sample_index: int = 0) -> Sequence:
        seq = make_sequence(name, len(token_ids), 40, sample_index)
        seq.token_ids = list(token_ids)
        return seq

    def running(self, token_ids: list[int], name: str = "a", num_computed: int | None = None) -> Sequence:
        """It holds its blocks, has computed all its tokens or so many, and has one token more."""
        seq = self.sequence(token_ids, name)
        self.manager.allocate(seq)
        self.manager.collect(wait=True)
        self.compute(seq, num_computed)
        if num_computed is None:
            seq.token_ids.append(100 + len(token_ids))
        return seq

    def group(self, token_ids: list[int], n: int, name: str = "a") -> list[Sequence]:
        """Samples that have just been forked: they hold the prompt's blocks, and each has a token of its own."""
        leader = self.running(token_ids, name)
        followers = [self.sequence(token_ids, name, i) for i in range(1, n)]
        for i, seq in enumerate(followers):
            self.manager.fork(leader, seq, len(token_ids))
            seq.token_ids.append(200 + i)
        return [leader, *followers]

    def left(self, token_ids: list[int]) -> None:
        """Such a sequence has come, was computed, and has gone."""
        self.manager.free(self.running(token_ids))
        self.manager.check_integrity()

    def compute(self, seq: Sequence, num_tokens: int | None = None) -> None:
        """As many of its tokens as that, or all: to blocks that it holds alone."""
        end = seq.num_tokens if num_tokens is None else seq.num_computed_tokens + num_tokens
        for position in range(seq.num_computed_tokens, end):
            block = seq.block_table[position // BLOCK_SIZE]
            assert self.manager._pool.ref_count(block) == 1, "who writes to a block holds it alone"
            assert block not in self.manager.prefix_cache.blocks, "what is cached is never written"
            self.kv_cache.blocks[block, :, :, position % BLOCK_SIZE] = keys_and_values(tuple(seq.token_ids), position)
        seq.num_computed_tokens = end
        self.manager.cache_blocks(seq)

    def grow(self, *seqs: Sequence) -> int:
        """A step in which all compute their last token and get another. How many blocks were copied."""
        copies = [copy for seq in seqs if (copy := self.manager.append_slot(seq))]
        self.kv_cache.copy_blocks({copy.target: copy.source for copy in copies})
        for i, seq in enumerate(seqs):
            self.compute(seq)
            seq.token_ids.append(250 + i)
        return len(copies)

    def assert_bytes(self, *seqs: Sequence) -> None:
        """What they have computed is there, in every layer."""
        for seq in seqs:
            assert seq.num_computed_tokens, "there is nothing to compare"
            for position in range(seq.num_computed_tokens):
                block, offset = seq.block_table[position // BLOCK_SIZE], position % BLOCK_SIZE
                expected = keys_and_values(tuple(seq.token_ids), position)
                assert torch.equal(self.kv_cache.blocks[block, :, :, offset], expected), f"token {position} is lost"

    def overwrite_what_is_free(self) -> None:
        """As if others had used it."""
        free = self.manager._pool._free
        self.kv_cache.blocks[free] = float("nan")

    def fail_copies(self, are_failing: bool = True) -> None:
        self.host_pool.fails = lambda: are_failing

    def hold_copies_back(self) -> None:
        """From now on copies are done when host_pool.finish() is called, or somebody waits."""
        self.host_pool.is_late = lambda: True

    def state(self) -> tuple:
        """All that an operation that fails may not change."""
        manager = self.manager
        pools = [(list(pool._free), list(pool._ref_counts)) for pool in (manager._pool, manager._host)]
        idle = [list(tier._idle) for tier in (manager.prefix_cache.blocks, manager.prefix_cache.host_blocks)]
        return pools, idle, manager.report(), list(manager._holders), list(manager._swapped), dict(manager._arriving)

    def assert_empty(self) -> None:
        """Nobody is left: every block is free on both tiers."""
        self.manager.collect(wait=True)
        self.manager.check_integrity()
        assert self.num_free == (self.manager.num_blocks, self.host_pool.num_blocks)
        assert not self.manager.is_copying and not self.manager._holders and not self.manager._swapped


def keys_and_values(token_ids: tuple[int, ...], position: int) -> Tensor:
    return numbers_of(token_ids[: position + 1])


@lru_cache(maxsize=4096)
def numbers_of(token_ids: tuple[int, ...]) -> Tensor:
    """Of the last of these tokens. [num_layers, 2, num_kv_heads, head_dim]"""
    generator = torch.Generator().manual_seed(crc32(repr(token_ids).encode()))
    return torch.randn(NUM_LAYERS, 2, 2, 8, generator=generator)


def num_blocks_of(seq: Sequence) -> int:
    """That have computed tokens in them."""
    return cdiv(seq.num_computed_tokens, BLOCK_SIZE)
