"""SlotManager: which sequence holds which slots of the pool. Each holds one contiguous range.

A slot is memory for one token's keys and values in all layers. How many to reserve is the question of this stage:

    reservation="max_model_len"  as many as the longest sequence allowed: equal ranges, mostly empty
    reservation="request"        prompt + max_tokens: less is empty, but sizes differ and holes stay between them
"""

from itertools import pairwise

from .kv_cache import PoolReport
from .observer import Observer
from .sequence import Sequence, SlotRange


class SlotManager:
    """First fit (Knuth, TAOCP 1, 2.5) over a list of free ranges, sorted by start and never adjacent."""

    def __init__(self, num_slots: int, reservation: str, max_model_len: int, observer: Observer) -> None:
        self.num_slots = num_slots
        self._reservation = reservation
        self._max_model_len = max_model_len
        self._observer = observer
        self._free = [SlotRange(0, num_slots)]
        self._holders: set[Sequence] = set()
        self._peak = self.report()

    def num_reserved(self, seq: Sequence) -> int:
        """Return how many slots `seq` reserves for its whole life."""
        return self._max_model_len if self._reservation == "max_model_len" else seq.max_num_tokens

    def can_allocate(self, seq: Sequence) -> bool:
        return self._first_fit(self.num_reserved(seq)) is not None

    def allocate(self, seq: Sequence) -> None:
        """Reserve slots for `seq` in the first free range that is large enough. There must be one."""
        size = self.num_reserved(seq)
        index = self._first_fit(size)
        assert index is not None and seq.slots is None, f"request {seq.request_id} cannot reserve {size} slots"
        start, free_size = self._free[index]
        self._free[index : index + 1] = [SlotRange(start + size, free_size - size)] if free_size > size else []
        seq.slots = SlotRange(start, size)
        self._holders.add(seq)

    def free(self, seq: Sequence) -> None:
        """Give the slots of `seq` back, and join them with the free ranges on either side."""
        self._peak = self.peak
        self._holders.remove(seq)
        slots, seq.slots = seq.slots, None
        first, *others = sorted([*self._free, slots])
        self._free = [first]
        for piece in others:
            last = self._free[-1]
            if last.end == piece.start:
                self._free[-1] = SlotRange(last.start, last.size + piece.size)
            else:
                self._free.append(piece)
        self._observer.tell("free", seq, slots)

    @property
    def peak(self) -> PoolReport:
        """The report with the most slots held so far. Only free() lowers their number, and it looks here first."""
        return max(self._peak, self.report(), key=lambda report: (report.held, report.used))

    def report(self) -> PoolReport:
        return PoolReport(
            num_slots=self.num_slots,
            promised=sum(seq.max_num_tokens for seq in self._holders),
            pieces=tuple(sorted((*seq.slots, seq.num_computed_tokens) for seq in self._holders)),
        )

    def check_integrity(self) -> None:
        """Raise AssertionError unless each slot is in one range, held or free, and free ranges are joined."""
        pieces = sorted([SlotRange(0, 0), *self._free, *(seq.slots for seq in self._holders)])
        assert all(a.end == b.start for a, b in pairwise(pieces)), f"a slot is in no range or in two: {pieces}"
        assert pieces[-1].end == self.num_slots, f"{pieces[-1].end} slots, the pool has {self.num_slots}"
        assert all(a.end < b.start for a, b in pairwise(self._free)), f"free ranges are not joined: {self._free}"

    def _first_fit(self, size: int) -> int | None:
        """Return the index of the first free range of at least `size` slots."""
        return next((i for i, piece in enumerate(self._free) if piece.size >= size), None)
