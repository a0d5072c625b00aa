"""Scheduler: which sequences run in this step, and how many tokens of each. It is decided anew at every step.

    add -> waiting -- admit, first come first served --> running -> finish
              ^                                             |
              +------- preempt, the latest one first -------+

Both queues together are in order of arrival at all times: a sequence that waits came after all that run. So none is
overtaken, and a preempted sequence is the next one to be admitted.
"""

from collections import OrderedDict
from typing import NamedTuple

from ..backends.torch.model_runner import Scheduled
from .block_manager import BlockManager, cdiv
from .config import EngineConfig
from .kv_cache import BlockCopy
from .sequence import Sequence


class SchedulerOutput(NamedTuple):
    batch: list[Scheduled]
    copies: list[BlockCopy]  # to be made before the step writes, also if nobody runs in it
    failed: list[Sequence]  # sequences that can never go on: they have ended


class Scheduler:
    def __init__(self, config: EngineConfig, kv_cache_manager: BlockManager) -> None:
        self.waiting: OrderedDict[Sequence, None] = OrderedDict()  # a queue from which anyone can leave at once
        self.running: list[Sequence] = []
        self.num_preemptions = 0
        self._kv_cache_manager = kv_cache_manager
        self._max_num_seqs = config.max_num_seqs
        self._max_num_batched_tokens = config.max_num_batched_tokens
        self._watermark_blocks = int(config.watermark * kv_cache_manager.num_blocks)

    def add(self, seq: Sequence) -> None:
        self.waiting[seq] = None

    def remove(self, seq: Sequence) -> None:
        """`seq` has ended, whatever its state: it leaves its queue and gives its blocks back."""
        if seq in self.waiting:
            del self.waiting[seq]
        elif seq in self.running:  # else it has left already, or was never forked
            self.running.remove(seq)
            self._kv_cache_manager.free(seq)

    def schedule(self) -> SchedulerOutput:
        """Decodes first, a token each; then chunks of prompts, with what is left of max_num_batched_tokens.

        Takes the blocks that the step will write to. Ends as soon as a sequence has failed.
        """
        output = SchedulerOutput(batch=[], copies=[], failed=[])
        num_preemptions = self.num_preemptions
        self._kv_cache_manager.collect_loads()
        self._fork_prompts()
        budget = self._schedule_decodes(output, self._max_num_batched_tokens)
        budget = self._schedule_chunks(output, budget)
        # A preempted sequence would be admitted first, and preempted again in the next step.
        if self.num_preemptions == num_preemptions and not output.failed:
            self._admit(output, budget)
        return output

    def _fork_prompts(self) -> None:
        """Where one token of a prompt is left to compute, its samples run from now on, each with a token of its own.

        They stand right behind the one that carried them, so `running` stays in order of arrival.
        """
        for seq in [seq for seq in self.running if seq.to_fork and seq.num_uncomputed_tokens == 1]:
            for sample in seq.to_fork:
                self._kv_cache_manager.fork(seq, sample)
            behind = self.running.index(seq) + 1
            self.running[behind:behind], seq.to_fork = seq.to_fork, []

    def _schedule_decodes(self, output: SchedulerOutput, budget: int) -> int:
        """A sequence that is not ready is passed over, and nobody makes room for it. Returns what is left."""
        for seq in list(self.running):
            if budget == 0 or output.failed:
                break
            is_preempted = seq in self.waiting  # by one before it
            if seq.num_uncomputed_tokens > 1 or is_preempted or not self._kv_cache_manager.is_ready(seq):
                continue
            if self._make_room(seq, output):
                copy = self._kv_cache_manager.append_slot(seq)
                output.copies.extend([copy] if copy else [])
                output.batch.append((seq, 1))
                budget -= 1
        return budget

    def _schedule_chunks(self, output: SchedulerOutput, budget: int) -> int:
        """As many tokens as the budget allows of each running sequence that has more than one to compute, in order.

        Their blocks were allocated on admission. Returns what is left of the budget.
        """
        for seq in self.running:
            if seq.num_uncomputed_tokens > 1:
                budget = self._schedule_chunk(seq, output, budget)
        return budget

    def _schedule_chunk(self, seq: Sequence, output: SchedulerOutput, budget: int) -> int:
        """As many tokens of `seq` as it has to compute and the budget allows; none if it is not ready.

        One that carries samples stops before its last token, which each of them computes by itself. Returns what is
        left of the budget.
        """
        if not self._kv_cache_manager.is_ready(seq):  # it takes no budget: others run meanwhile
            return budget
        # The last token of a prompt that is to be forked is left to each of its samples.
        num_tokens = min(seq.num_uncomputed_tokens - bool(seq.to_fork), budget)
        if num_tokens > 0:
            output.batch.append((seq, num_tokens))
        return budget - num_tokens

    def _admit(self, output: SchedulerOutput, budget: int) -> None:
        """From waiting to running, in order, while there is a seat, budget, and what _may_admit() asks for.

        Each takes the blocks of all its tokens. If they are ready, it is scheduled for as many tokens as the budget has
        left. One that needs more blocks than the pool has fails: it outgrew the pool.
        """
        while self.waiting and budget > 0:
            seq = next(iter(self.waiting))
            if self._num_blocks(seq) > self._kv_cache_manager.num_blocks:
                self._fail(seq, output)
                break
            if not self._may_admit(seq):
                break
            self._kv_cache_manager.allocate(seq)
            self.waiting.popitem(last=False)
            self.running.append(seq)
            budget = self._schedule_chunk(seq, output, budget)

    def _may_admit(self, seq: Sequence) -> bool:
        """Return True if there is a seat for `seq` and for each sample that it carries, and blocks for all its tokens.

        Beside others a sequence, new or preempted, must leave the watermark free, for those that run to grow into, and
        a block for each sample that it carries.
        """
        num_seats = sum(1 + len(other.to_fork) for other in [seq, *self.running])
        if num_seats > self._max_num_seqs:
            return False
        spare = self._watermark_blocks + len(seq.to_fork) if self.running else 0
        return self._kv_cache_manager.can_allocate(seq, spare)

    def _make_room(self, seq: Sequence, output: SchedulerOutput) -> bool:
        """Preempt, the latest first, until `seq` can have a slot for its last token.

        Returns False if it cannot: it was the latest itself, and waits; or it is alone, and has failed.
        """
        while not self._kv_cache_manager.can_append(seq):
            if self.running == [seq]:
                self._fail(seq, output)
                return False
            # It is `seq` or behind it, and the batch so far is in front of `seq`: nobody scheduled loses a block.
            victim = self.running[-1]
            self._preempt(victim)
            if victim is seq:
                return False
        return True

    def _preempt(self, seq: Sequence) -> None:
        """Take its blocks and put it in front of all that wait; nothing of it is computed then.

        num_preemptions counts it. When it is admitted again, its prompt and all that it generated are prefilled as one
        prompt would be.
        """
        self._kv_cache_manager.free(seq)
        seq.num_computed_tokens = 0
        self.running.remove(seq)
        self.waiting[seq] = None
        self.waiting.move_to_end(seq, last=False)
        self.num_preemptions += 1

    def preempt_all(self) -> None:
        """A step broke off: what it began is forgotten, and computed again."""
        while self.running:
            self._preempt(self.running[-1])

    def _fail(self, seq: Sequence, output: SchedulerOutput) -> None:
        needed, num_blocks = self._num_blocks(seq), self._kv_cache_manager.num_blocks
        self.remove(seq)
        seq.fail(f"{seq.num_tokens} tokens need {needed} blocks, the pool has {num_blocks}")
        output.failed.append(seq)

    def _num_blocks(self, seq: Sequence) -> int:
        """That all its tokens fill."""
        return cdiv(seq.num_tokens, self._kv_cache_manager.block_size)
