"""SlotManager: which sequence holds which slots of the pool. Each holds one contiguous range.

A slot is memory for one token's keys and values in all layers. How many to reserve is the question of this stage:

    reservation="max_model_len"  as many as the longest sequence allowed: equal ranges, mostly empty
    reservation="request"        prompt + max_tokens: less is empty, but sizes differ and holes stay between them
"""

from itertools import chain, pairwise

from .kv_cache import PoolReport
from .observer import Observer
from .sequence import Sequence


class SlotManager:
    """First fit: a sequence gets the first free range that is large enough (Knuth, TAOCP volume 1, section 2.5)."""

    def __init__(self, num_slots: int, reservation: str, max_model_len: int, observer: Observer) -> None:
        self.num_slots = num_slots
        self._reservation = reservation
        self._max_model_len = max_model_len
        self._observer = observer
        self._holders: set[Sequence] = set()
        self._peak = self.report()

    def num_reserved(self, seq: Sequence) -> int:
        """Return how many slots `seq` reserves for its whole life."""
        return self._max_model_len if self._reservation == "max_model_len" else seq.max_num_tokens

    def can_allocate(self, seq: Sequence) -> bool:
        return self._first_fit(self.num_reserved(seq)) is not None

    def allocate(self, seq: Sequence) -> None:
        """Reserve num_reserved(seq) slots for `seq`. Raise AssertionError, and change nothing, if they do not fit."""
        size = self.num_reserved(seq)
        start = self._first_fit(size)
        assert start is not None and not seq.slots, f"request {seq.request_id} cannot reserve {size} slots"
        seq.slots = range(start, start + size)
        self._holders.add(seq)

    def free(self, seq: Sequence) -> None:
        """Give back the slots of `seq`, which then has None. They join the free slots on either side.

        `peak` must not lose a report with more slots held. At the end, tell the observer "free", with the slots.
        """
        self._peak = self.peak
        self._holders.remove(seq)
        slots, seq.slots = seq.slots, None
        self._observer.tell("free", seq, slots)

    def free_ranges(self) -> list[range]:
        """Return the free slots, in order, as ranges that neither touch nor are empty."""
        held = sorted((seq.slots for seq in self._holders), key=lambda slots: slots.start)
        neighbors = pairwise([range(0), *held, range(self.num_slots, self.num_slots)])
        return [range(left.stop, right.start) for left, right in neighbors if left.stop < right.start]

    @property
    def peak(self) -> PoolReport:
        """The report with the most slots held so far. free() keeps it in _peak before it gives slots back."""
        return max(self._peak, self.report(), key=lambda report: (report.held, report.used))

    def report(self) -> PoolReport:
        """Return how much of the pool is promised, held and used now."""
        return PoolReport(
            num_slots=self.num_slots,
            promised=sum(seq.max_num_tokens for seq in self._holders),
            pieces=tuple(sorted((seq.slots.start, len(seq.slots), seq.num_computed_tokens) for seq in self._holders)),
            largest_free=max(map(len, self.free_ranges()), default=0),
        )

    def check_integrity(self) -> None:
        """Raise AssertionError if a slot is held twice, or is not in the pool."""
        slots = [slot for seq in self._holders for slot in seq.slots] + [*chain(*self.free_ranges())]
        assert sorted(slots) == [*range(self.num_slots)], "a slot is in no range, or in two"

    def _first_fit(self, size: int) -> int | None:
        """Return the start of the first free range of at least `size` slots, or None."""
        return next((slots.start for slots in self.free_ranges() if len(slots) >= size), None)
