"""Scheduler: which sequences run in this step, and how many tokens of each. It is decided anew at every step.

    add -> waiting -- admit, first come first served --> running -> finish
              ^                                             |
              +------- preempt, the latest one first -------+

Both queues together are in order of arrival at all times: whoever waits came after all who run. So nobody is overtaken,
and a preempted sequence is the next one to be admitted.

The samples of a request, its group, lie side by side in a queue. They are admitted, preempted and failed as one. On
admission the first of them, the leader, gets blocks; the others follow it: they are forked from it once it has computed
what they share.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import groupby
from typing import NamedTuple

from .config import EngineConfig
from .model_runner import Scheduled
from .sequence import Sequence, shared_prefix
from .swapping_block_manager import SwappingBlockManager


class SchedulerOutput(NamedTuple):
    batch: list[Scheduled]
    failed: list[Sequence]  # those that can never go on: they have ended


class Scheduler:
    def __init__(
        self, config: EngineConfig, block_manager: SwappingBlockManager, prefers_swap: Callable[[int, int], bool]
    ) -> None:
        """prefers_swap(blocks, tokens): whether a preempted group should be swapped rather than computed again."""
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.copies: dict[int, int] = {}  # blocks, {target: source}: to be made before the next step writes
        self.num_preemptions = 0
        self.num_swaps = 0  # among them
        self._block_manager = block_manager
        self._prefers_swap = prefers_swap
        self._max_num_seqs = config.max_num_seqs
        self._max_num_batched_tokens = config.max_num_batched_tokens
        self._watermark_blocks = int(config.watermark * block_manager.num_blocks)

    def add(self, group: list[Sequence]) -> None:
        self.waiting += group

    def remove(self, seq: Sequence) -> None:
        """`seq` has ended, whatever its state: if it is in a queue it leaves it, and gives its blocks back."""
        if seq in self.running:
            self.running.remove(seq)
            if seq.block_table:
                self._block_manager.free(seq)
        elif seq in self.waiting:
            self.waiting.remove(seq)
            self._block_manager.drop(seq)

    def fork_followers(self, leader: Sequence) -> None:
        """Those whose share the leader has computed by now hold its blocks too, and run by themselves from now on."""
        for seq in list(leader.followers):
            num_shared = shared_prefix(leader, seq)
            if num_shared <= leader.num_computed_tokens:
                self._block_manager.fork(leader, seq, num_shared)
                leader.followers.remove(seq)

    def schedule(self) -> SchedulerOutput:
        """Decodes first, a token each; then chunks of prompts, with what is left of max_num_batched_tokens.

        Takes the blocks that the step will write to. Nobody is admitted in a step that had to preempt: a group that
        shares again may need less than it gave back, and be preempted again as soon as its samples write. Nor while
        what was taken from a swapped group is being stored: others would take what is free beside it from whoever waits
        for both.
        """
        output = SchedulerOutput(batch=[], failed=[])
        num_preemptions = self.num_preemptions
        self._block_manager.collect()
        self._take_slots(output)
        budget = self._schedule_decodes(output, self._max_num_batched_tokens)
        budget = self._schedule_chunks(output, budget)
        if self.num_preemptions == num_preemptions and not self._block_manager.is_storing:
            self._admit(output, budget)
        return output

    def _take_slots(self, output: SchedulerOutput) -> None:
        """For all who run, in order of arrival: slots for the tokens that they have, in blocks of their own.

        Before anybody is scheduled: whoever is preempted to make room is not in the batch yet.
        """
        for group in list(groups(self.running)):
            has_arrived = all(self._block_manager.has_arrived(seq) for seq in group)
            if has_arrived and self._make_room(group, output):
                for seq in group:
                    copy = self._block_manager.append_slot(seq) if seq.block_table else None
                    if copy:
                        self.copies[copy.target] = copy.source

    def _schedule_decodes(self, output: SchedulerOutput, budget: int) -> int:
        """Returns what is left of the budget."""
        decodes = [seq for seq in self.running if seq.num_uncomputed_tokens == 1 and self._block_manager.is_ready(seq)]
        output.batch.extend((seq, 1) for seq in decodes[:budget])
        return budget - len(decodes[:budget])

    def _schedule_chunks(self, output: SchedulerOutput, budget: int) -> int:
        """Those that run and have more than one token to compute, in order, as many tokens as the budget has left.

        Returns what is left of the budget.
        """
        for seq in self.running:
            num_tokens = min(seq.num_uncomputed_tokens, budget)
            if seq.num_uncomputed_tokens > 1 and num_tokens > 0 and self._block_manager.is_ready(seq):
                output.batch.append((seq, num_tokens))
                budget -= num_tokens
        return budget

    def _admit(self, output: SchedulerOutput, budget: int) -> None:
        """From waiting to running, in order, while there are seats, budget, and what _may_admit() asks for.

        A leader takes the blocks of all its tokens, and is scheduled for as many tokens as the budget has left. A group
        that needs more blocks than the pool has fails, and the next one is first.
        """
        while self.waiting and budget > 0:
            group = next(groups(self.waiting))
            leader, *followers = group
            if any(seq.host_table for seq in group):
                if not self._swap_in(group):
                    break
            elif self._block_manager.num_blocks_for(*group) > self._block_manager.num_blocks:  # it outgrew the pool
                self._fail(group, self._block_manager.num_blocks_for(*group), output)
            elif len(self.running) + len(group) <= self._max_num_seqs and self._may_admit(group):
                self._block_manager.allocate(leader)
                leader.followers = followers
                self.running += [self.waiting.popleft() for _ in group]
                if self._block_manager.is_ready(leader):  # nothing of its prefix is being loaded
                    num_tokens = min(leader.num_uncomputed_tokens, budget)
                    output.batch.append((leader, num_tokens))
                    budget -= num_tokens
            else:
                break

    def _may_admit(self, group: list[Sequence]) -> bool:
        """Whether there are blocks for all its tokens.

        Beside others a new group must leave the watermark free, for those that run to grow into.
        """
        return self._block_manager.can_allocate(*group, spare=self._watermark_blocks if self.running else 0)

    def _make_room(self, group: list[Sequence], output: SchedulerOutput) -> bool:
        """Preempt, the latest first, until all of `group` that hold blocks can have slots for their tokens.

        False if they cannot: the group was the latest itself, and waits; or it is alone, and has failed.
        """
        holders = [seq for seq in group if seq.block_table]
        while not self._block_manager.can_append(*holders):
            if self._block_manager.is_storing:  # blocks will come free without anybody else's being preempted
                return False
            if len(self.running) == len(group):
                num_held = self._block_manager.num_blocks - self._block_manager.num_free_blocks
                self._fail(group, num_held + self._block_manager.num_blocks_to_append(*holders), output)
                return False
            *_, victim = groups(self.running)
            self._preempt(victim)
            if victim == group:
                return False
        return True

    def _preempt(self, group: list[Sequence]) -> None:
        """Take its blocks and put it in front of all who wait; num_preemptions counts it.

        When it is admitted again, its blocks are brought back from the host; or it starts over.
        """
        is_swapped = self._swap_out(group)
        for seq in group:
            self.remove(seq)
        if not is_swapped:
            self._start_over(group)
        self.waiting.extendleft(reversed(group))
        self.num_preemptions += 1

    def _swap_out(self, group: list[Sequence]) -> bool:
        """False if it is cheaper to compute the group again, or if the host has no room, or the copies fail.

        Nor is a block moved that is yet to be copied from another; nor is it a swap if there is none to move. What is
        weighed is the tokens that would be computed again: what the members share counts once. num_swaps counts it.
        """
        leader, *others = group
        num_tokens = leader.num_computed_tokens  # that would be computed again, what the group shares once
        num_tokens += sum(max(0, seq.num_computed_tokens - shared_prefix(leader, seq)) for seq in others)
        num_blocks = self._block_manager.num_blocks_to_swap(group)
        is_whole = not any(block in self.copies for seq in group for block in seq.block_table)
        if not (num_blocks and is_whole and self._prefers_swap(num_blocks, num_tokens)):
            return False
        try:
            self._block_manager.swap_out(group)
        except RuntimeError:  # NoFreeBlocks is one
            return False
        self.num_swaps += 1
        return True

    def _swap_in(self, group: list[Sequence]) -> bool:
        """From waiting to running, if there are seats, and blocks as for a new group; False if it has to wait for them.

        It is scheduled once its blocks are there. It starts over if the copies fail, or if it has the pool to itself
        and does not fit: as a new one it may, or fail.
        """
        has_seats = len(self.running) + len(group) <= self._max_num_seqs
        if has_seats and self._block_manager.can_swap_in(group, self._watermark_blocks if self.running else 0):
            try:
                self._block_manager.swap_in(group)
                self.running += [self.waiting.popleft() for _ in group]
                return True
            except RuntimeError:
                pass
        elif self.running or self._block_manager.is_copying:
            return False
        self._start_over(group)
        return True

    def _start_over(self, group: list[Sequence]) -> None:
        """Its prompt and all that it generated are to be computed anew, what its members share once."""
        for seq in group:
            self._block_manager.drop(seq)
            seq.num_computed_tokens, seq.followers = 0, []

    def _fail(self, group: list[Sequence], needed: int, output: SchedulerOutput) -> None:
        """`needed`: how many blocks the group would have to hold."""
        num_tokens = sum(seq.num_tokens for seq in group)
        who = f"{num_tokens} tokens" if len(group) == 1 else f"{len(group)} samples, {num_tokens} tokens in all,"
        for seq in group:
            self.remove(seq)
            seq.fail(f"{who} need {needed} blocks, the pool has {self._block_manager.num_blocks}")
        output.failed.extend(group)


def groups(queue: Iterable[Sequence]) -> Iterator[list[Sequence]]:
    """The samples of each request, which lie side by side."""
    return (list(group) for _, group in groupby(queue, key=lambda seq: seq.request_id))
