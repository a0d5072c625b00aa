"""StepInputs: the inputs of decode steps, at fixed addresses. One copy per step brings them to the device.

    host, pinned    [input_ids | positions | ... | sampling parameters | seats | changed entries of the block tables]
                                                    one asynchronous copy
    device          the same, and the block tables [max_rows, max_blocks]

Rows are in the order of the batch. Block tables stay on the device: a step sends only the entries that changed, which
is usually one for every sixteenth row. To keep changes rare, a sequence keeps the place of its table, its seat, for as
long as it runs, whatever its row is. Rows without a sequence are padding: slot -1, context length 0, temperature 0.

While the device computes a step, prepare() guesses the next one: the same sequences, one token further. fill() compares
the guess with the real batch, and usually has little left to write. If the guess is wrong, fill() starts over. The host
has two buffers, because the copy of a step that was launched ahead may not have started yet.
"""

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from ...engine.executor import Scheduled
from ...engine.sequence import Sequence
from ..torch.backend import ends_of
from ..torch.model_runner import sampling_rows
from ..torch.sampler import RowParams, noise_key, row_params

# Several fields in one buffer, so that a single copy brings all of them to the device

DTypes = Mapping[str, torch.dtype]  # by field name, widest dtype first


def allocate_fields(dtypes: DTypes, size: int, device: torch.device, is_pinned: bool = False) -> Tensor:
    """Return a uint8 buffer with room for `size` elements of each field. Copies from pinned memory are asynchronous."""
    num_bytes = size * sum(dtype.itemsize for dtype in dtypes.values())
    return torch.zeros(num_bytes, dtype=torch.uint8, device=device, pin_memory=is_pinned)


def field_views(buffer: Tensor, dtypes: DTypes) -> dict[str, Tensor]:
    """Return views of the fields in a buffer from allocate_fields(), each [size].

    >>> fields = field_views(torch.zeros(24, dtype=torch.uint8), {"a": torch.int64, "b": torch.int32})
    >>> fields["a"].shape, fields["b"].shape
    (torch.Size([2]), torch.Size([2]))
    """
    size = len(buffer) // sum(dtype.itemsize for dtype in dtypes.values())
    parts = buffer.split([size * dtype.itemsize for dtype in dtypes.values()])
    return {name: part.view(dtype) for (name, dtype), part in zip(dtypes.items(), parts, strict=True)}


NO_SLOT = -1


def fill_placeholders(input_ids: Tensor, newest: Tensor) -> Tensor:
    """Replace each id below 0, which is ~row, with the token that the latest step has sampled in that row.

    input_ids, out int64 [num_tokens]; newest int64 [max_rows]

    >>> fill_placeholders(torch.tensor([7, ~1]), torch.tensor([30, 31])).tolist()
    [7, 31]
    """
    return torch.where(input_ids < 0, newest.index_select(0, (~input_ids).clamp(min=0)), input_ids)


SAMPLING_FIELDS = {  # RowParams, each [max_rows]
    "key": torch.int64,
    "top_k": torch.int64,
    "temperature": torch.float32,
    "top_p": torch.float32,
    "min_p_gap": torch.float32,
}
FIELDS = {  # each [max_rows]
    "input_ids": torch.int64,
    "positions": torch.int64,
    "slot_mapping": torch.int64,
    "seats": torch.int64,  # where each row's block table is
    "changed_entries": torch.int64,  # indices into the flat block tables,
    **SAMPLING_FIELDS,
    "context_lens": torch.int32,
    "changed_blocks": torch.int32,  # and the new blocks there
}


def sampling_params(fields: Mapping[str, Tensor], rows: int) -> RowParams:
    """Return the sampling parameters of the first rows of fields."""
    return RowParams(**{name: fields[name][:rows, None] for name in SAMPLING_FIELDS})


class HostBuffer:
    """The fields in host memory, as numpy arrays: writing a few numbers through torch costs several times as much."""

    def __init__(self, max_rows: int, is_pinned: bool) -> None:
        self._buffer = allocate_fields(FIELDS, max_rows, torch.device("cpu"), is_pinned)
        views = field_views(self._buffer, FIELDS)
        self.fields: dict[str, np.ndarray] = {name: view.numpy() for name, view in views.items()}
        self._copied = torch.cuda.Event() if is_pinned else None  # set once the buffer may be written again

    def copy_to(self, buffer: Tensor) -> None:
        buffer.copy_(self._buffer, non_blocking=True)
        if self._copied:
            self._copied.record()

    def wait(self) -> None:
        """Wait until the latest copy is done."""
        if self._copied:
            self._copied.synchronize()


class StepInputs:
    """The inputs of decode steps of up to `max_rows` sequences."""

    def __init__(self, max_rows: int, max_blocks: int, block_size: int, device: torch.device) -> None:
        self._block_size, self._max_blocks, self._max_rows = block_size, max_blocks, max_rows
        is_cuda = device.type == "cuda"
        self._host, self._spare = (HostBuffer(max_rows, is_cuda) for _ in range(2))
        self._fields = self._host.fields
        self._buffer = allocate_fields(FIELDS, max_rows, device)
        self.device = field_views(self._buffer, FIELDS)
        # One entry more than the tables have: unused changes write there.
        self._flat_tables = torch.zeros(max_rows * max_blocks + 1, dtype=torch.int32, device=device)
        self._tables = self._flat_tables[:-1].view(max_rows, max_blocks)  # int32 [max_rows, max_blocks], by seat
        self._sent_tables: list[list[int]] = [[] for _ in range(max_rows)]  # by seat, what the device has
        self._seqs: list[Sequence] = []  # of the latest step, with their seats and positions
        self._seats: list[int] = []
        self._positions: list[int] = []
        self._is_prepared = False

    def fill(self, batch: list[Scheduled]) -> None:
        """Copy a step to the device: row i belongs to the i-th item of the batch."""
        seqs, positions = [seq for seq, _ in batch], [end - 1 for end in ends_of(batch)]
        if not (self._is_prepared and seqs == self._seqs and positions == self._positions):
            self._begin(seqs, positions)
        self._is_prepared = False
        rows = list(zip(seqs, positions, strict=True))
        self._fields["input_ids"][: len(rows)] = [seq.input_id(at) for seq, at in rows]
        for row, (seq, at) in enumerate(rows):
            if seq.params.temperature > 0:
                self._fields["key"][row] = noise_key(seq.seed, seq.sample_index, at + 1)
        self._write_changes(seqs)
        self._host.copy_to(self._buffer)

    def prepare(self) -> None:
        """Guess the next step while the latest one runs: the same sequences, one token further."""
        latest = self._fields
        self._next_buffer()
        for name, values in latest.items():
            self._fields[name][:] = values
        rows = len(self._seqs)
        for name in ("positions", "context_lens", "slot_mapping"):
            self._fields[name][:rows] += 1  # fill() corrects the slot if a new block begins
        self._positions = [position + 1 for position in self._positions]
        self._is_prepared = True

    def forget(self) -> None:
        """Send all tables again with the next step. Call this if the device may have missed changes."""
        self._seqs, self._seats, self._is_prepared = [], [], False

    def block_tables(self, rows: int) -> Tensor:
        """Apply the changes that fill() has sent, and return the tables of the first rows, int32 [rows, max_blocks].

        This runs on the device, as part of the step.
        """
        self._flat_tables.index_copy_(0, self.device["changed_entries"], self.device["changed_blocks"])
        return self._tables.index_select(0, self.device["seats"][:rows])

    def _next_buffer(self) -> None:
        """Write to the other buffer from now on. Its copy belongs to an earlier step, so it is usually done."""
        self._host, self._spare = self._spare, self._host
        self._host.wait()
        self._fields = self._host.fields

    def _begin(self, seqs: list[Sequence], positions: list[int]) -> None:
        """Write a step from scratch, except for what fill() writes in any case."""
        if not self._is_prepared:
            self._next_buffer()
        self._seats = self._assign_seats(seqs)
        self._seqs, self._positions = seqs, positions
        fields, rows = self._fields, len(seqs)
        fields["slot_mapping"][rows:], fields["context_lens"][rows:], fields["temperature"][rows:] = NO_SLOT, 0, 0
        fields["seats"][:rows], fields["positions"][:rows] = self._seats, positions
        fields["context_lens"][:rows] = [at + 1 for at in positions]
        fields["slot_mapping"][:rows] = [self._slot(seq, at) for seq, at in zip(seqs, positions, strict=True)]
        for name, column in row_params(sampling_rows(seqs), torch.device("cpu"))._asdict().items():
            fields[name][:rows] = column[:, 0]

    def _slot(self, seq: Sequence, position: int) -> int:
        return seq.block_table[position // self._block_size] * self._block_size + position % self._block_size

    def _assign_seats(self, seqs: list[Sequence]) -> list[int]:
        """Return the seat of each row's sequence: the one that it had in the latest step, or a free one."""
        seats = {id(seq): seat for seq, seat in zip(self._seqs, self._seats, strict=True)}
        taken = {seats[id(seq)] for seq in seqs if id(seq) in seats}
        free = (seat for seat in range(self._max_rows) if seat not in taken)
        for seq in seqs:
            if id(seq) not in seats:
                seat = seats[id(seq)] = next(free)
                self._sent_tables[seat] = []
        return [seats[id(seq)] for seq in seqs]

    def _write_changes(self, seqs: list[Sequence]) -> None:
        """Write the table entries that changed since they were sent, and the slots of rows whose table changed."""
        entries, blocks, size, changed = list[int](), list[int](), self._block_size, set[int]()
        for row, (seat, seq, position) in enumerate(zip(self._seats, seqs, self._positions, strict=True)):
            sent, table = self._sent_tables[seat], seq.block_table
            if sent != table:
                first = len(sent) if sent == table[: len(sent)] else 0  # 0 after a preemption or a copied block
                self._sent_tables[seat] = table.copy()
                entries += range(seat * self._max_blocks + first, seat * self._max_blocks + len(table))
                blocks += table[first:]
                changed.add(seat)
            if seat in changed or position % size == 0:
                self._fields["slot_mapping"][row] = self._slot(seq, position)
        most = self._max_rows
        if len(entries) > most:  # new sequences send whole tables; the overflow needs a separate copy
            rest = torch.tensor(entries[most:], dtype=torch.int64, device=self._flat_tables.device)
            rest_blocks = torch.tensor(blocks[most:], dtype=torch.int32, device=self._flat_tables.device)
            self._flat_tables.index_copy_(0, rest, rest_blocks)
        count = min(len(entries), most)
        fields = self._fields
        fields["changed_entries"][:], fields["changed_blocks"][:] = len(self._flat_tables) - 1, 0
        fields["changed_entries"][:count], fields["changed_blocks"][:count] = entries[:count], blocks[:count]
