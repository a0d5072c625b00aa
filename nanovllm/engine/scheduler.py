"""Scheduler: which sequences run in the next step, and how many tokens of each. It decides anew for every step.

    add -> waiting -- admit, first come first served --> running -> finish
              ^                                             |
              +------- preempt, the newest first -----------+

`running` and then `waiting` are in order of arrival at all times, so nobody is overtaken, and a preempted sequence is
the next one to be admitted. Scheduling per step is Orca's idea (Yu et al. 2022), chunked prefill is Sarathi-Serve's
(Agrawal et al. 2024, arXiv:2403.02310).
"""

from collections import OrderedDict
from dataclasses import dataclass, field

from .block_manager import BlockManager, cdiv
from .config import EngineConfig
from .executor import Scheduled
from .kv_cache import BlockCopy
from .observer import Observer
from .sequence import Sequence


@dataclass
class SchedulerOutput:
    """The next step."""

    budget: int  # how many more tokens the step may compute
    batch: list[Scheduled] = field(default_factory=list)
    copies: list[BlockCopy] = field(default_factory=list)  # to make before the step writes
    failed: list[Sequence] = field(default_factory=list)  # sequences that can never go on


class Scheduler:
    """The two queues, and the rule that fills a step from them."""

    def __init__(self, config: EngineConfig, kv_cache_manager: BlockManager, observer: Observer) -> None:
        self.waiting: OrderedDict[Sequence, None] = OrderedDict()  # a queue that each sequence can leave in O(1)
        self.running: list[Sequence] = []
        self.num_preemptions = self.num_failed = 0
        self._kv_cache_manager = kv_cache_manager
        self._observer = observer
        self._max_num_seqs = config.max_num_seqs
        self._max_num_batched_tokens = config.max_num_batched_tokens
        self.watermark_blocks = int(config.watermark * kv_cache_manager.num_blocks)

    def add(self, seq: Sequence) -> None:
        """Put a new sequence at the end of the queue."""
        self.waiting[seq] = None
        self._observer.tell("add", seq)

    def remove(self, seq: Sequence) -> None:
        """Take a sequence that has ended out of its queue, and free its blocks. An unforked sample is in no queue."""
        if seq in self.running:
            self.running.remove(seq)
            self._kv_cache_manager.free(seq)
        elif seq in self.waiting:
            del self.waiting[seq]
        self._observer.tell("finish", seq)

    def schedule(self) -> SchedulerOutput:
        """Fill a step with up to max_num_batched_tokens tokens, and take the blocks that they will be written to."""
        output = SchedulerOutput(budget=self._max_num_batched_tokens)
        num_preemptions = self.num_preemptions
        for seq in list(self.running):
            self._fork_samples(seq)

        # First one token for each sequence that decodes, the oldest first. If no block is free, the newest sequence
        # is preempted. It stands behind all that are in the batch already, so none of these loses a block.
        index = 0
        while index < len(self.running) and output.budget > 0:
            seq = self.running[index]
            if seq.num_uncomputed_tokens > 1 or not self._kv_cache_manager.is_ready(seq):
                index += 1
            elif self._kv_cache_manager.can_append(seq):
                self._take(seq, output)
                index += 1
            elif len(self.running) > 1:
                self._preempt(self.running[-1], makes_room_for=seq)  # it may be `seq` itself
            elif self._kv_cache_manager.tier.arriving():  # the load of a preempted sequence still holds blocks
                index += 1
            else:
                self._fail(seq, output)

        # Then prompts, in chunks as large as the budget allows. Their blocks were allocated on admission.
        for seq in self.running:
            if seq.num_uncomputed_tokens > 1 and output.budget > 0:
                self._take(seq, output)

        # Then the waiting sequences, unless a sequence was just preempted: it would be admitted, and preempted again.
        while self.waiting and output.budget > 0 and num_preemptions == self.num_preemptions:
            seq = next(iter(self.waiting))
            if cdiv(seq.num_tokens, self._kv_cache_manager.block_size) > self._kv_cache_manager.num_blocks:
                self._fail(seq, output)
                continue
            hits = self._kv_cache_manager.find_hits(seq)
            if not self._may_admit(seq, hits):
                break
            self._kv_cache_manager.allocate(seq, hits)  # first: if a copy raises, the queues have not changed
            del self.waiting[seq]
            self.running.append(seq)
            for sample in [seq, *self._fork_samples(seq)]:
                if self._kv_cache_manager.can_append(sample):
                    self._take(sample, output)

        self._observer.tell("schedule", output)
        return output

    def _take(self, seq: Sequence, output: SchedulerOutput) -> None:
        """Add as many tokens of `seq` to the step as the budget allows; none if its blocks have not arrived.

        A sequence that carries samples leaves its last token alone: each of them computes it for itself.
        """
        num_tokens = min(seq.num_uncomputed_tokens - bool(seq.to_fork), output.budget)
        if num_tokens == 0 or not self._kv_cache_manager.is_ready(seq):
            return
        copy = self._kv_cache_manager.append_slot(seq)
        if copy:
            output.copies.append(copy)
        output.batch.append((seq, num_tokens))
        output.budget -= num_tokens

    def _fork_samples(self, seq: Sequence) -> list[Sequence]:
        """Fork the samples that `seq` carries once only its last token is left to compute. Return them.

        They run right behind it, so that `running` stays in order of arrival.
        """
        if not seq.to_fork or seq.num_uncomputed_tokens > 1:
            return []
        samples, seq.to_fork = seq.to_fork, []
        behind = self.running.index(seq) + 1
        self.running[behind:behind] = samples
        for sample in samples:
            self._kv_cache_manager.fork(seq, sample)
        return samples

    def _may_admit(self, seq: Sequence, hits: list[int | None]) -> bool:
        """Return True if there are seats for `seq` and its samples, and blocks for its tokens.

        Beside others it must leave the watermark free, for them to grow into, and a block for each of its samples.
        """
        seats = self._max_num_seqs - sum(1 + len(other.to_fork) for other in self.running)
        if 1 + len(seq.to_fork) > seats:
            self._observer.tell("wait", seq, "seat", 1 + len(seq.to_fork), seats)
            return False
        spare = (self.watermark_blocks + len(seq.to_fork)) if self.running else 0
        needed, free = self._kv_cache_manager.num_needed(seq, hits) + spare, self._kv_cache_manager.num_free_blocks
        if needed > free:
            self._observer.tell("wait", seq, "blocks", needed, free)
        return needed <= free

    def _preempt(self, seq: Sequence, makes_room_for: Sequence | None) -> None:
        """Free the blocks of a running sequence, and put it in front of the queue.

        Once it is admitted again, its prompt and its output so far are computed like one long prompt.
        """
        self.running.remove(seq)
        self._kv_cache_manager.free(seq)
        self.waiting[seq] = None
        self.waiting.move_to_end(seq, last=False)
        self.num_preemptions += 1
        seq.num_preemptions += 1
        self._observer.tell("preempt", seq, makes_room_for)

    def preempt_all(self) -> None:
        """Preempt all running sequences after a failed step: they must compute its tokens again."""
        while self.running:
            self._preempt(self.running[-1], makes_room_for=None)

    def _fail(self, seq: Sequence, output: SchedulerOutput) -> None:
        """End a sequence that has outgrown the whole pool."""
        needed = cdiv(seq.num_tokens, self._kv_cache_manager.block_size)
        error = f"{seq.num_tokens} tokens need {needed} blocks, the pool has {self._kv_cache_manager.num_blocks}"
        for sample in [seq, *seq.to_fork]:
            sample.finish("error", error)
            self.remove(sample)
        output.failed.append(seq)
        self.num_failed += 1
