"""Parts of the engine that count what core's do not: refused blocks, and sequences that end."""

from typing import Any, cast

from ..engine.prefix_cache import PrefixCacheStats
from ..engine.scheduler import Scheduler as CoreScheduler
from ..engine.scheduler import SchedulerOutput
from ..engine.sequence import Sequence as CoreSequence
from .engine import BlockManager as BaseBlockManager
from .sequence import Sequence
from .stats import BlockCounts
from .tally import Tally


class CountedSequence(Sequence):
    """It tells a Tally when it ends, and nothing before."""

    def __init__(self, tally: Tally, **fields: Any) -> None:
        super().__init__(**fields)
        self.tally = tally
        self.last_token_time: float | None = None  # where the engine looks at a clock in each step

    def note_admission(self) -> None:
        if self.num_cached_tokens is None:  # else it was preempted, and comes back
            self.tally.note_admission(self)
        super().note_admission()

    def finish(self, reason: str) -> None:
        super().finish(reason)
        self.tally.note_end(self)


class BlockManager(BaseBlockManager):
    def __init__(self, *parts: Any) -> None:
        self.num_refused = 0  # times that a sequence could not be admitted for lack of blocks
        self.past_prefix_cache_stats = PrefixCacheStats()  # from before the last reset
        super().__init__(*parts)

    def can_allocate(self, seq: CoreSequence, spare: int = 0) -> bool:
        """Called where the next to be admitted has a seat."""
        if super().can_allocate(seq, spare):
            return True
        self.num_refused += 1
        return False

    def allocate(self, seq: CoreSequence) -> None:
        counted = cast(CountedSequence, seq)
        is_looked_for = self._is_caching and counted.may_hit and counted.num_cached_tokens is None
        loaded_before = self._host.num_blocks_loaded
        super().allocate(seq)
        if is_looked_for:
            on_host = (self._host.num_blocks_loaded - loaded_before) * self.block_size
            on_device = seq.num_computed_tokens - on_host
            counted.tally.lookups.add(seq.num_tokens, on_device, on_host, has_host=self._host.num_blocks > 0)

    def reset_prefix_cache(self) -> bool:
        """The counts go on: they are since the start."""
        now, past = self.prefix_cache_stats, self.past_prefix_cache_stats
        is_reset = super().reset_prefix_cache()
        if is_reset:
            past.queries, past.hits = past.queries + now.queries, past.hits + now.hits
        return is_reset

    def block_counts(self) -> BlockCounts:
        ref_counts = list(self._pool.ref_counts)
        running = self.num_blocks - ref_counts.count(0)
        idle = sum(not ref_counts[block] for block in list(self._pool._hashes))
        return BlockCounts(running, idle, self.num_blocks - running - idle, len(self._host_pool._hashes))


class Scheduler(CoreScheduler):
    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        self._num_others = 0  # preemptions that no lack of blocks has caused
        self._num_failed = 0

    @property
    def num_out_of_blocks(self) -> int:
        """How often a running sequence needed a block and none was free: each time one was preempted, or failed."""
        return self.num_preemptions - self._num_others + self._num_failed

    @property
    def watermark_blocks(self) -> int:
        return self._watermark_blocks

    def preempt_all(self) -> None:
        before = self.num_preemptions
        super().preempt_all()
        self._num_others += self.num_preemptions - before

    def _fail(self, seq: CoreSequence, output: SchedulerOutput) -> None:
        self._num_failed += 1
        super()._fail(seq, output)
