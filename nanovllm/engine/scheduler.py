"""Scheduler: chooses, before every step, the sequences that run and how many tokens of each are computed.

    add -> waiting -- admit, first come first served --> running -> finish
              ^                                             |
              +---------- preempt, newest first ------------+

`running` followed by `waiting` is always in order of arrival: no sequence overtakes another, and a preempted one is the
next to be admitted. Scheduling step by step is from Orca (Yu et al. 2022), chunked prefill from Sarathi-Serve (Agrawal
et al. 2024, arXiv:2403.02310).
"""

from collections import OrderedDict
from dataclasses import dataclass, field

from ..options.config import EngineConfig
from ..requests.speculation import NgramDrafter
from .block_manager import BlockManager, cdiv
from .executor import Scheduled
from .kv_cache import BlockCopy
from .observer import Observer
from .sequence import Sequence


@dataclass
class SchedulerOutput:
    """The work of the next step."""

    budget: int  # how many more tokens the step may compute
    batch: list[Scheduled] = field(default_factory=list)  # decodes first
    copies: list[BlockCopy] = field(default_factory=list)  # to make before the step writes
    failed: list[Sequence] = field(default_factory=list)  # sequences that have outgrown the pool
    num_decodes: int = 0  # the first items of the batch: each computes the last token of its sequence


class Scheduler:
    """Two queues of sequences, and the rules that fill a step from them."""

    def __init__(self, config: EngineConfig, kv_cache_manager: BlockManager, observer: Observer) -> None:
        self.waiting: OrderedDict[Sequence, None] = OrderedDict()  # a queue that each sequence can leave in O(1)
        self.running: list[Sequence] = []
        self.num_preemptions = self.num_failed = 0
        self._kv_cache_manager = kv_cache_manager
        self._observer = observer
        self._max_num_seqs = config.max_num_seqs
        self._max_num_batched_tokens = config.max_num_batched_tokens
        self.watermark_blocks = int(config.watermark * kv_cache_manager.num_blocks)
        self._is_speculative = config.speculation() is not None

    def add(self, seq: Sequence) -> None:
        """Put a new sequence at the end of the queue."""
        self.waiting[seq] = None
        self._observer.tell("add", seq)

    def remove(self, seq: Sequence) -> None:
        """Remove a sequence that has ended from its queue, and free its blocks. An unforked sample is in no queue."""
        if seq in self.running:
            self.running.remove(seq)
            self._kv_cache_manager.free(seq)
        elif seq in self.waiting:
            del self.waiting[seq]
        self._observer.tell("finish", seq)

    def schedule(self) -> SchedulerOutput:
        """Fill a step with up to max_num_batched_tokens tokens, and take the blocks that they are written to.

        1. Preempt sequences, the newest first, until no running one holds a lost block.
        2. Decodes (sequences with exactly one uncomputed token), the oldest first. A decode that finds no free block
           preempts the newest sequence. If no other sequence runs, the decode waits while its token is in flight or
           loads hold blocks, and otherwise fails.
        3. Running prompts, the oldest first, with what is left of the budget.
        4. Waiting sequences in order, until _may_admit() refuses one. A sequence larger than the pool fails. After a
           preemption in this step, no sequence is admitted: the first in line has just lost its blocks.
        5. Drafts, with what is left of the budget and the blocks.

        A sequence does not run while its blocks are loading, or once its last token is in flight. Tell the observer
        "schedule" at the end.
        """
        output, num_preemptions = SchedulerOutput(budget=self._max_num_batched_tokens), self.num_preemptions
        self._preempt_broken_and_fork()

        # First, one token for each sequence that decodes. Preemption takes the last of `running`, which comes after
        # every sequence that is already in the batch, so no sequence of the batch loses a block.
        index, running, batch, others = 0, self.running, output.batch, list[Sequence]()
        while index < len(running) and output.budget > 0:
            seq = running[index]
            num_tokens = len(seq.token_ids) + seq.num_output_placeholders  # written out: this runs for each token
            if num_tokens - seq.num_computed_tokens - seq.num_in_flight_tokens == 1 and num_tokens <= seq.ready_until:
                batch.append((seq, 1))
                output.budget -= 1
                index += 1
            elif seq.num_uncomputed_tokens != 1 or seq.ends_in_flight or not self._kv_cache_manager.is_ready(seq):
                others.append(seq)
                index += 1
            elif self._kv_cache_manager.can_append(seq):
                self._take(seq, output)
                index += 1
            elif len(running) > 1:
                self._preempt(running[-1], makes_room_for=seq)  # it may be `seq` itself
            elif seq.num_in_flight_tokens or self._kv_cache_manager.tier.arriving():
                index += 1  # `seq` may end with its token in flight; the load of a preempted sequence holds blocks
            else:
                self._fail(seq, output)

        output.num_decodes = len(output.batch)

        # Then running prompts, in chunks as large as the budget allows. They got their blocks on admission.
        for seq in others:
            if seq.num_uncomputed_tokens > 1 and output.budget > 0:
                self._take(seq, output)

        # Then waiting sequences. After a preemption, the first one has just lost its blocks, and does not fit.
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

        # Finally drafts: no sequence waits or loses a block for a guess.
        if self._is_speculative:
            self._add_drafts(output)

        self._observer.tell("schedule", output)
        return output

    def _take(self, seq: Sequence, output: SchedulerOutput) -> None:
        """Add as many tokens of `seq` to the step as the budget allows, and the copy that writing them requires.

        Add nothing if its blocks have not arrived or no token is left to add. A sequence with samples to fork leaves
        out its last token, which each sample computes for itself.
        """
        num_tokens = min(seq.num_uncomputed_tokens - bool(seq.to_fork), output.budget)
        if num_tokens == 0 or not self._kv_cache_manager.is_ready(seq):
            return
        copy = self._kv_cache_manager.append_slot(seq)
        if copy:
            output.copies.append(copy)
        output.batch.append((seq, num_tokens))
        output.budget -= num_tokens

    def _preempt_broken_and_fork(self) -> None:
        """Preempt sequences until none holds a lost block. Fork the samples of prompts that are computed."""
        while not self._kv_cache_manager.broken.isdisjoint(self.running):
            self._preempt(self.running[-1], makes_room_for=None)
        for seq in [seq for seq in self.running if seq.to_fork]:
            self._fork_samples(seq)

    def _add_drafts(self, output: SchedulerOutput) -> None:
        """Add a draft to each sequence that may have one, and whose last token is in the step."""
        for seq, num_tokens in output.batch:
            if seq.drafter is not None and num_tokens == seq.num_uncomputed_tokens:
                self._draft(seq, seq.drafter, output)

    def _draft(self, seq: Sequence, drafter: NgramDrafter, output: SchedulerOutput) -> None:
        """Add a draft after the last token of `seq`, in free blocks. Tell the observer "draft" if there is one.

        The draft leaves room for the token sampled after it: together they stay within max_num_tokens.
        """
        draft = drafter.propose(seq.token_ids, min(output.budget, seq.max_num_tokens - seq.num_tokens - 1))
        seq.draft_token_ids = draft[: self._kv_cache_manager.append_draft_slots(seq, len(draft))]
        output.budget -= len(seq.draft_token_ids)
        if seq.draft_token_ids:
            self._observer.tell("draft", seq)

    def _fork_samples(self, seq: Sequence) -> list[Sequence]:
        """Fork the samples in `seq.to_fork`, once only the last token of `seq` is left to compute. Return them.

        They follow `seq` in `running`, which stays in order of arrival.
        """
        if not seq.to_fork or seq.num_uncomputed_tokens > 1 or seq.num_in_flight_tokens:
            return []
        samples, seq.to_fork = seq.to_fork, []
        behind = self.running.index(seq) + 1
        self.running[behind:behind] = samples
        for sample in samples:
            self._kv_cache_manager.fork(seq, sample)
        return samples

    def _may_admit(self, seq: Sequence, hits: list[int | None]) -> bool:
        """Return True if max_num_seqs allows `seq` and its samples, and there are blocks for its tokens.

        If other sequences run, `seq` must leave a reserve (the watermark) free for them to grow into, and a block for
        each of its samples. If `seq` must wait, tell the observer "wait", with the reason ("seat" or "blocks") and how
        many seats or blocks are needed and free. The number needed includes the blocks that must stay free.
        """
        num_unforked = sum([len(other.to_fork) for other in self.running if other.to_fork])
        seats = self._max_num_seqs - len(self.running) - num_unforked
        if 1 + len(seq.to_fork) > seats:
            self._observer.tell("wait", seq, "seat", 1 + len(seq.to_fork), seats)
            return False
        spare = (self.watermark_blocks + len(seq.to_fork)) if self.running else 0
        needed, free = self._kv_cache_manager.num_needed(seq, hits) + spare, self._kv_cache_manager.num_free_blocks
        if needed > free:
            self._observer.tell("wait", seq, "blocks", needed, free)
        return needed <= free

    def _preempt(self, seq: Sequence, makes_room_for: Sequence | None) -> None:
        """Free the blocks of a running sequence, move it to the front of `waiting`, and count it in num_preemptions.

        The sequence keeps its output. Once admitted again, its prompt and output are computed like one long prompt.
        Tell the observer "preempt", with both sequences.
        """
        self.running.remove(seq)
        self._kv_cache_manager.free(seq)
        self.waiting[seq] = None
        self.waiting.move_to_end(seq, last=False)
        self.num_preemptions += 1
        seq.num_preemptions += 1
        self._observer.tell("preempt", seq, makes_room_for)

    def preempt_all(self) -> None:
        """Preempt all running sequences, so that they start over: after a failed step, or to reset the prefix cache."""
        while self.running:
            self._preempt(self.running[-1], makes_room_for=None)

    def _fail(self, seq: Sequence, output: SchedulerOutput) -> None:
        """End a sequence that has outgrown the whole pool, and its unforked samples, with an error."""
        needed = cdiv(seq.num_tokens, self._kv_cache_manager.block_size)
        error = f"{seq.num_tokens} tokens need {needed} blocks, the pool has {self._kv_cache_manager.num_blocks}"
        for sample in [seq, *seq.to_fork]:
            sample.finish("error", error)
            self.remove(sample)
        output.failed.append(seq)
        self.num_failed += 1
