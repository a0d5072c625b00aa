"""Scheduler: chooses, before every step, the sequences that run and how many tokens of each are computed.

    add -> waiting -- admit, first come first served --> running -> finish
              ^                                             |
              +---------- preempt, newest first ------------+

`running` followed by `waiting` is always in order of arrival: no sequence overtakes another, and a preempted one is the
next to be admitted. Scheduling step by step is from Orca (Yu et al. 2022), chunked prefill from Sarathi-Serve (Agrawal
et al. 2024, arXiv:2403.02310).
"""

from collections import deque
from dataclasses import dataclass, field

from .block_manager import BlockManager, cdiv
from .config import EngineConfig
from .kv_cache import BlockCopy
from .model_runner import Scheduled
from .observer import Observer
from .sequence import Sequence
from .speculation import propose


@dataclass
class SchedulerOutput:
    """The work of the next step."""

    budget: int  # how many more tokens the step may compute
    batch: list[Scheduled] = field(default_factory=list)  # in no particular order
    copies: list[BlockCopy] = field(default_factory=list)  # to make before the step writes
    failed: list[Sequence] = field(default_factory=list)  # sequences that have outgrown the pool


class Scheduler:
    """Two queues of sequences, and the rules that fill a step from them."""

    def __init__(self, config: EngineConfig, kv_cache_manager: BlockManager, observer: Observer) -> None:
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.num_preemptions = 0
        self._kv_cache_manager = kv_cache_manager
        self._observer = observer
        self._max_num_seqs = config.max_num_seqs
        self._max_num_batched_tokens = config.max_num_batched_tokens
        self._num_speculative_tokens, self._suffix_len = config.num_speculative_tokens, config.prompt_lookup_max
        self._watermark_blocks = int(config.watermark * kv_cache_manager.num_blocks)

    def add(self, seq: Sequence) -> None:
        """Put a new sequence at the end of the queue."""
        self.waiting.append(seq)
        self._observer.tell("add", seq)

    def remove(self, seq: Sequence) -> None:
        """Remove a sequence that has ended from its queue, and free its blocks. An unforked sample is in no queue."""
        if seq in self.running:
            self.running.remove(seq)
            self._kv_cache_manager.free(seq)
        elif seq in self.waiting:
            self.waiting.remove(seq)
        self._observer.tell("finish", seq)

    def schedule(self) -> SchedulerOutput:
        """Fill a step with up to max_num_batched_tokens tokens, and take the blocks that they are written to.

        A sequence decodes if exactly one of its tokens is uncomputed. Decodes go first, the oldest first. What is left
        of the budget goes to running prompts, the oldest first, and then to waiting sequences in order, as far as
        _may_admit() lets them in. A sequence whose blocks have not arrived does not run. A decode that finds no block
        preempts the newest sequence; one that runs alone waits while loads hold blocks, or fails. A step that preempts
        admits none. While budget is left, the first in line fails if it is larger than the pool. Drafts get what is
        left of the budget in the end. Tell the observer "schedule" at the end.
        """
        output = SchedulerOutput(budget=self._max_num_batched_tokens)
        num_preemptions = self.num_preemptions
        for seq in list(self.running):
            self._fork_samples(seq)

        # First, one token for each sequence that decodes. Preemption takes the last of `running`, which comes after
        # every sequence that is already in the batch, so no sequence of the batch loses a block.
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
            elif self._kv_cache_manager.tier.loads:  # they hold blocks, which are free once the loads have arrived
                index += 1
            else:
                self._fail(seq, output)

        # Then running prompts, in chunks as large as the budget allows. They got their blocks on admission.
        for seq in self.running:
            if seq.num_uncomputed_tokens > 1 and output.budget > 0:
                self._take(seq, output)

        # Then waiting sequences. After a preemption, the first one has just lost its blocks, and does not fit.
        while self.waiting and output.budget > 0 and num_preemptions == self.num_preemptions:
            seq = self.waiting[0]
            if cdiv(seq.num_tokens, self._kv_cache_manager.block_size) > self._kv_cache_manager.num_blocks:
                self._fail(seq, output)
                continue
            hits = self._kv_cache_manager.find_hits(seq)
            if not self._may_admit(seq, hits):
                break
            self.running.append(self.waiting.popleft())
            self._kv_cache_manager.allocate(seq, hits)
            for sample in [seq, *self._fork_samples(seq)]:
                if self._kv_cache_manager.can_append(sample):
                    self._take(sample, output)

        # Finally drafts: no sequence waits or loses a block for a guess.
        output.batch = [(seq, num_tokens + self._draft(seq, num_tokens, output)) for seq, num_tokens in output.batch]

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

    def _draft(self, seq: Sequence, num_tokens: int, output: SchedulerOutput) -> int:
        """Draft tokens for `seq` if the step computes its last one, and return how many.

        They are in `draft_token_ids`, have slots, and are taken off the budget. With the token that is sampled after
        them, they stay within max_num_tokens.
        """
        if num_tokens < seq.num_uncomputed_tokens:
            return 0
        longest = min(self._num_speculative_tokens, output.budget, seq.max_num_tokens - seq.num_tokens - 1)
        draft = propose(seq.token_ids, self._suffix_len, longest)
        seq.draft_token_ids = draft[: self._kv_cache_manager.append_draft_slots(seq, len(draft))]
        output.budget -= len(seq.draft_token_ids)
        return len(seq.draft_token_ids)

    def _fork_samples(self, seq: Sequence) -> list[Sequence]:
        """Fork the samples in `seq.to_fork`, once only the last token of `seq` is left to compute. Return them.

        They follow `seq` in `running`, which stays in order of arrival.
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
        """Return True if max_num_seqs allows `seq` and its samples, and there are blocks for its tokens.

        If other sequences run, `seq` must leave a reserve (the watermark) free for them to grow into, and a block for
        each of its samples. If `seq` must wait, tell the observer "wait", with the reason ("seat" or "blocks") and how
        many seats or blocks are needed and free. The number needed includes the blocks that must stay free.
        """
        seats = self._max_num_seqs - sum(1 + len(other.to_fork) for other in self.running)
        if 1 + len(seq.to_fork) > seats:
            self._observer.tell("wait", seq, "seat", 1 + len(seq.to_fork), seats)
            return False
        spare = (self._watermark_blocks + len(seq.to_fork)) if self.running else 0
        needed, free = self._kv_cache_manager.num_needed(seq, hits) + spare, self._kv_cache_manager.num_free_blocks
        if needed > free:
            self._observer.tell("wait", seq, "blocks", needed, free)
        return needed <= free

    def _preempt(self, seq: Sequence, makes_room_for: Sequence) -> None:
        """Free the blocks of a running sequence, move it to the front of `waiting`, and count it in num_preemptions.

        The sequence keeps its output. Once admitted again, its prompt and output are computed like one long prompt.
        Tell the observer "preempt", with both sequences.
        """
        self.running.remove(seq)
        self._kv_cache_manager.free(seq)
        self.waiting.appendleft(seq)
        self.num_preemptions += 1
        self._observer.tell("preempt", seq, makes_room_for)

    def _fail(self, seq: Sequence, output: SchedulerOutput) -> None:
        """End a sequence that has outgrown the whole pool, and its unforked samples, with an error."""
        needed = cdiv(seq.num_tokens, self._kv_cache_manager.block_size)
        error = f"{seq.num_tokens} tokens need {needed} blocks, the pool has {self._kv_cache_manager.num_blocks}"
        for sample in [seq, *seq.to_fork]:
            sample.finish("error", error)
            self.remove(sample)
        output.failed.append(seq)
