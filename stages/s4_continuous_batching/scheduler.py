"""Scheduler: which sequences run in this step, and how many tokens of each. It is decided anew at every step.

    add -> waiting -- admit, first come first served --> running -> finish
              ^                                             |
              +------- preempt, the latest one first -------+

Both queues together are in order of arrival at all times: whoever waits came after all who run. So nobody is overtaken,
and a preempted sequence is the next one to be admitted.
"""

from collections import deque
from typing import NamedTuple

from .block_manager import BlockManager, cdiv
from .config import EngineConfig
from .model_runner import Scheduled
from .sequence import Sequence


class SchedulerOutput(NamedTuple):
    batch: list[Scheduled]
    failed: list[Sequence]  # those that can never go on: they have ended


class Scheduler:
    def __init__(self, config: EngineConfig, block_manager: BlockManager) -> None:
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.num_preemptions = 0
        self._block_manager = block_manager
        self._max_num_seqs = config.max_num_seqs
        self._max_num_batched_tokens = config.max_num_batched_tokens
        self._watermark_blocks = int(config.watermark * block_manager.num_blocks)

    def add(self, seq: Sequence) -> None:
        self.waiting.append(seq)

    def remove(self, seq: Sequence) -> None:
        """`seq` has ended, whatever its state: it leaves its queue and gives its blocks back."""
        if seq in self.running:
            self.running.remove(seq)
            self._block_manager.free(seq)
        else:
            self.waiting.remove(seq)

    def schedule(self) -> SchedulerOutput:
        """Decodes first, a token each; then chunks of prompts, with what is left of max_num_batched_tokens.

        Takes the blocks that the step will write to.
        """
        output = SchedulerOutput(batch=[], failed=[])
        budget = self._schedule_decodes(output, self._max_num_batched_tokens)
        budget = self._schedule_chunks(output, budget)
        self._admit(output, budget)
        return output

    def _schedule_decodes(self, output: SchedulerOutput, budget: int) -> int:
        """Returns what is left of the budget."""
        for seq in [seq for seq in self.running if seq.num_uncomputed_tokens == 1]:
            if budget == 0:
                break
            if seq in self.running and self._make_room(seq, output):  # one before it may have preempted it
                self._block_manager.append_slot(seq)
                output.batch.append((seq, 1))
                budget -= 1
        return budget

    def _schedule_chunks(self, output: SchedulerOutput, budget: int) -> int:
        """Those that run and have more than one token to compute, in order, as many tokens as the budget has left.

        Their blocks were allocated on admission. Returns what is left of the budget.
        """
        for seq in self.running:
            num_tokens = min(seq.num_uncomputed_tokens, budget)
            if seq.num_uncomputed_tokens > 1 and num_tokens > 0:
                output.batch.append((seq, num_tokens))
                budget -= num_tokens
        return budget

    def _admit(self, output: SchedulerOutput, budget: int) -> None:
        """From waiting to running, in order, while there is a seat, budget, and what _may_admit() asks for.

        Each takes the blocks of all its tokens, and is scheduled for as many tokens as the budget has left. One that
        needs more blocks than the pool has fails, and the next one is first.
        """
        while self.waiting and len(self.running) < self._max_num_seqs and budget > 0:
            seq = self.waiting[0]
            needed, num_blocks = cdiv(seq.num_tokens, self._block_manager.block_size), self._block_manager.num_blocks
            if needed > num_blocks:  # it outgrew the pool
                self._fail(seq, output)
            elif self._may_admit(seq):
                self._block_manager.allocate(seq)
                self.running.append(self.waiting.popleft())
                num_tokens = min(seq.num_tokens, budget)
                output.batch.append((seq, num_tokens))
                budget -= num_tokens
            else:
                break

    def _may_admit(self, seq: Sequence) -> bool:
        """Whether there are blocks for all its tokens.

        Beside others a new sequence must leave the watermark free, for those that run to grow into.
        """
        if not self.running:
            return self._block_manager.can_allocate(seq)
        needed = cdiv(seq.num_tokens, self._block_manager.block_size) + self._watermark_blocks
        return needed <= self._block_manager.num_free_blocks

    def _make_room(self, seq: Sequence, output: SchedulerOutput) -> bool:
        """Preempt, the latest first, until `seq` can have a slot for its last token.

        False if it cannot: it was the latest itself, and waits; or it is alone, and has failed.
        """
        while not self._block_manager.can_append(seq):
            if self.running == [seq]:
                self._fail(seq, output)
                return False
            victim = self.running[-1]
            self._preempt(victim)
            if victim is seq:
                return False
        return True

    def _preempt(self, seq: Sequence) -> None:
        """Take its blocks and put it in front of all who wait; num_preemptions counts it.

        When it is admitted again, its prompt and all that it generated are computed anew.
        """
        self._block_manager.free(seq)
        seq.num_computed_tokens = 0
        self.running.remove(seq)
        self.waiting.appendleft(seq)
        self.num_preemptions += 1

    def _fail(self, seq: Sequence, output: SchedulerOutput) -> None:
        needed = cdiv(seq.num_tokens, self._block_manager.block_size)
        self.remove(seq)
        seq.fail(f"{seq.num_tokens} tokens need {needed} blocks, the pool has {self._block_manager.num_blocks}")
        output.failed.append(seq)
