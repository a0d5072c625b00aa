"""SlotManager: who holds which slots of the pool. Every sequence holds one piece.

A slot is room for one token's keys and values, in all layers. How large a piece to reserve is this stage's question:

    reservation="max_model_len"  every piece is as long as the longest sequence allowed: all alike, mostly empty
    reservation="request"        prompt + max_tokens: less empty, but sizes differ, and holes stay between the pieces
"""

from itertools import pairwise

from .kv_cache import PoolReport
from .sequence import Sequence, SlotRange


class NoFreeSlots(RuntimeError):
    """No free piece is large enough."""


class SlotManager:
    """First fit over a list of free pieces, sorted by start and never adjacent."""

    def __init__(self, num_slots: int, reservation: str, max_model_len: int) -> None:
        self.num_slots = num_slots
        self._reservation = reservation
        self._max_model_len = max_model_len
        self._free: list[SlotRange] = [SlotRange(0, num_slots)]
        self._holders: dict[Sequence, None] = {}  # in order of admission
        self._peak = self.report()

    def num_reserved(self, seq: Sequence) -> int:
        """Slots that `seq` reserves for its whole life, in one piece."""
        return self._max_model_len if self._reservation == "max_model_len" else seq.max_num_tokens

    def can_allocate(self, seq: Sequence) -> bool:
        return self._first_fit(self.num_reserved(seq)) is not None

    def allocate(self, seq: Sequence) -> None:
        """Reserve a piece for `seq`. Raises NoFreeSlots, and changes nothing, if no free piece is large enough."""
        assert seq not in self._holders, f"request {seq.request_id} holds slots already"
        size = self.num_reserved(seq)
        index = self._first_fit(size)
        if index is None:
            raise NoFreeSlots(f"{size} slots in one piece are needed, the largest free one has {self._largest_free()}")
        piece = self._free[index]
        rest = SlotRange(piece.start + size, piece.size - size)
        self._free[index : index + 1] = [rest] if rest.size else []
        seq.slots = SlotRange(piece.start, size)
        self._holders[seq] = None

    def can_append(self, seq: Sequence) -> bool:
        return seq.slots is not None and seq.num_tokens <= seq.slots.size

    def append_slot(self, seq: Sequence) -> None:
        """Make sure of a slot for the last token of `seq`. It was reserved on admission: nothing is taken."""
        assert self.can_append(seq), f"request {seq.request_id}: {seq.num_tokens} tokens outgrew {seq.slots}"

    def free(self, seq: Sequence) -> None:
        """Give the piece back, and join it with the free pieces on either side. Raises ValueError if there is none."""
        if seq not in self._holders:
            raise ValueError(f"request {seq.request_id} holds no slots")
        self._peak = self.peak
        del self._holders[seq]
        pieces = sorted([*self._free, seq.slots])
        self._free = [pieces[0]]
        for piece in pieces[1:]:
            last = self._free[-1]
            if last.end == piece.start:
                self._free[-1] = SlotRange(last.start, last.size + piece.size)
            else:
                self._free.append(piece)
        seq.slots = None

    @property
    def peak(self) -> PoolReport:
        """The pool when most of it was held. Less is held only after a free(): it is enough to look before each."""
        return max(self._peak, self.report(), key=lambda report: (report.held, report.used))

    def report(self) -> PoolReport:
        """What of the pool is promised, held and used now."""
        seqs = sorted(self._holders, key=lambda seq: seq.slots)
        return PoolReport(
            num_slots=self.num_slots,
            promised=sum(seq.max_num_tokens for seq in seqs),
            pieces=tuple((seq.slots.start, seq.slots.size, seq.num_computed_tokens) for seq in seqs),
            largest_free=self._largest_free(),
            holes=sum(piece.end < self.num_slots for piece in self._free),
        )

    def check_integrity(self) -> None:
        """Every slot is in exactly one piece, held or free; free pieces are sorted and joined."""
        assert all(seq.slots is not None for seq in self._holders)
        held = [seq.slots for seq in self._holders if seq.slots]
        at = 0
        for piece in sorted([*self._free, *held]):
            assert piece.size > 0 and piece.start == at, f"slots {at}..{piece.start} are in no piece or in two"
            at = piece.end
        assert at == self.num_slots, f"{at} slots are accounted for, of {self.num_slots}"
        for left, right in pairwise(self._free):
            assert left.end < right.start, f"free pieces {left} and {right} are not joined"

    def _first_fit(self, size: int) -> int | None:
        """Index of the first free piece of at least `size` slots."""
        return next((i for i, piece in enumerate(self._free) if piece.size >= size), None)

    def _largest_free(self) -> int:
        return max((piece.size for piece in self._free), default=0)
