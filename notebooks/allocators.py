"""Blocks filled with texts of given lengths, and other ways to hand out memory, to set beside them: slabs by size
class, pieces that are moved together, blocks reused first in, first out, and two faults of a text about blocks.
"""

import math
from collections import deque
from collections.abc import Iterable
from typing import Any

import torch

from notebooks import traffic
from stages import s2_block_manager as s2
from stages.s1_contiguous_cache.slot_manager import SlotManager
from stages.s2_block_manager.block_manager import BlockManager, cdiv
from stages.s2_block_manager.block_pool import BlockPool, NoFreeBlocks

Seq = Any  # a stage's Sequence


def sequences(config: Any, lengths: Iterable[int]) -> list[Seq]:
    """Sequences of stage 2 with a prompt of each length. `config` is a ModelConfig."""
    requests = [traffic.Request(length, 1, 1) for length in lengths]
    longest = 2 + max(request.num_prompt_tokens for request in requests)
    return [seq for seq, _ in traffic.arrivals(s2, config, requests, longest)]


def in_blocks(seqs: Iterable[Seq], block_size: int) -> Any:
    """The report of a pool that holds all of `seqs`, with all of their tokens computed."""
    seqs = list(seqs)
    manager = BlockManager(sum(cdiv(seq.num_tokens, block_size) for seq in seqs), block_size)
    for seq in seqs:
        manager.allocate(seq)
        seq.num_computed_tokens = seq.num_tokens
    return manager.report()


def size_class(size: int, ratio: float, largest: int) -> int:
    """The least of the classes largest, largest / ratio, largest / ratio², ... (rounded up) that holds `size`.

    >>> [size_class(size, 2, largest=64) for size in (1, 2, 3, 32, 33)]
    [1, 2, 4, 32, 64]
    """
    power = math.floor(round(math.log(largest / size, ratio), 9))
    return max(size, math.ceil(round(largest / ratio**power, 9)))


def slab_waste(sizes: Iterable[int], ratio: float, largest: int) -> float:
    """The empty share of what is handed out if each size gets a piece of its class.

    >>> slab_waste([32], 2, largest=64), slab_waste([33], 2, largest=64)
    (0.0, 0.484375)
    """
    sizes = list(sizes)
    return 1 - sum(sizes) / sum(size_class(size, ratio, largest) for size in sizes)


class Compacting:
    """For traffic.replay: lets a sequence into a SlotManager wherever enough is free, and moves the others together
    first if that is not in one piece. `moved` has the tokens whose keys and values that copies, one entry a time.
    """

    def __init__(self) -> None:
        self.moved: list[int] = []
        self._admitted: list[Seq] = []

    def __call__(self, manager: SlotManager, seq: Seq) -> bool:
        free = manager.num_slots - manager.report().held
        if not manager.can_allocate(seq) and free >= manager.num_reserved(seq):
            self._move_together(manager)
        fits = manager.can_allocate(seq)
        if fits:
            self._admitted.append(seq)
        return fits

    def _move_together(self, manager: SlotManager) -> None:
        """First fit puts everybody at the beginning, in the order in which they lie."""
        self._admitted = [seq for seq in self._admitted if seq.slots is not None]
        holders = sorted(self._admitted, key=lambda seq: seq.slots)
        starts = [seq.slots.start for seq in holders]
        for seq in holders:
            manager.free(seq)
        for seq in holders:
            manager.allocate(seq)
        after = zip(holders, starts, strict=True)
        self.moved.append(sum(seq.num_computed_tokens for seq, start in after if seq.slots.start != start))


class FirstInFirstOut(BlockPool):
    """A pool that hands out the block that has been free for longest."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks)
        self._queue = deque(range(num_blocks))

    @property
    def num_free(self) -> int:
        return len(self._queue)

    def take(self, count: int) -> list[int]:
        if count > len(self._queue):
            raise NoFreeBlocks(f"{count} blocks are needed, {len(self._queue)} are free")
        return [self._queue.popleft() for _ in range(count)]

    def give_back(self, blocks: list[int]) -> None:
        self._queue.extend(blocks)


def write_in_turn(pool: BlockPool, memory: torch.Tensor, times: int = 100, count: int = 8) -> None:
    """Take some blocks, write all of each, and give them back; and so on. memory [num_blocks, numbers of a block]"""
    for _ in range(times):
        blocks = pool.get_new_blocks(count)
        for block in blocks:
            memory[block].fill_(1)
        pool.free_blocks(blocks)


class WithTwoFaults:
    """Blocks with two faults of "Memory Pool Management: Slab Allocators for GPU Inference", retold, not copied.

    >>> blocks = WithTwoFaults(num_blocks=4, block_size=16)
    >>> blocks.allocate_sequence("a", 10); blocks.extend_sequence("a", 1); len(blocks.tables["a"])
    2
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.free = list(range(num_blocks))
        self.tables: dict[str, list[int]] = {}

    def allocate_sequence(self, name: str, num_tokens: int) -> None:
        table = []
        for _ in range(cdiv(num_tokens, self.block_size)):
            if not self.free:  # the fault: what is in `table` by now belongs to nobody, and is not given back
                raise NoFreeBlocks("out of blocks")
            table.append(self.free.pop())
        self.tables[name] = table

    def extend_sequence(self, name: str, num_tokens: int) -> None:
        table = self.tables[name]
        have = len(table) * self.block_size  # the fault: blocks are counted, not tokens, so the last one seems full
        for _ in range(cdiv(have + num_tokens, self.block_size) - len(table)):
            table.append(self.free.pop())
