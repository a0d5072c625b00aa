"""StepInputs: the inputs of decode steps, at fixed addresses. One copy per step sends them to the device.

    host, pinned    [input_ids | positions | ... | sampling parameters | table indices | changed block table entries]
                                                    one asynchronous copy
    device          the same, and the block tables [max_rows, max_blocks]

Rows are in the order of the batch. Block tables stay on the device: a step sends only the entries that changed, usually
one for every 16 rows. To keep changes rare, a sequence's table stays at the same index while the sequence runs, even
if its row changes. Rows without a sequence are padding: slot -1, context length 0, temperature 0.

While the device computes a step, prepare() guesses the next one: the same sequences, one token further. fill() compares
the guess with the actual batch, and usually has little left to write. If the guess is wrong, fill() starts over. The
host has two buffers, because the latest step's copy may not have started when prepare() writes the next inputs.
"""

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from ...engine.executor import Scheduled
from ...engine.sequence import Sequence
from ..torch.backend import end_positions
from ..torch.model_runner import sampling_rows
from ..torch.sampler import RowParams, noise_key, row_params

# Several fields in one buffer, so that a single copy sends all of them to the device

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


NO_SLOT = -1  # in slot_mapping, for a padding row


def fill_placeholders(input_ids: Tensor, latest_tokens: Tensor) -> Tensor:
    """Return the ids, with each placeholder ~row, which is negative, replaced by that row's token of the latest step.

    input_ids and the result int64 [num_tokens]; latest_tokens int64 [max_rows]

    >>> fill_placeholders(torch.tensor([7, ~1]), torch.tensor([30, 31])).tolist()
    [7, 31]
    """
    return torch.where(input_ids < 0, latest_tokens.index_select(0, (~input_ids).clamp(min=0)), input_ids)


SAMPLING_FIELDS = {  # of RowParams, each [max_rows]
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
    "table_indices": torch.int64,  # the index of each row's block table
    "changed_entries": torch.int64,  # indices into the flat block tables
    **SAMPLING_FIELDS,
    "context_lens": torch.int32,
    "changed_blocks": torch.int32,  # the new blocks at these entries
}


def sampling_params(fields: Mapping[str, Tensor], rows: int) -> RowParams:
    """Return the sampling parameters of the first `rows` rows, each [rows, 1]."""
    return RowParams(**{name: fields[name][:rows, None] for name in SAMPLING_FIELDS})


class HostBuffer:
    """The fields in host memory, as numpy arrays: writing a few numbers through torch costs several times as much."""

    def __init__(self, max_rows: int, is_pinned: bool) -> None:
        self._buffer = allocate_fields(FIELDS, max_rows, torch.device("cpu"), is_pinned)
        views = field_views(self._buffer, FIELDS)
        self.fields: dict[str, np.ndarray] = {name: view.numpy() for name, view in views.items()}
        self._copied = torch.cuda.Event() if is_pinned else None  # complete once the buffer may be written again

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
        self._host, self._other_host = (HostBuffer(max_rows, is_cuda) for _ in range(2))
        self._fields = self._host.fields
        self._buffer = allocate_fields(FIELDS, max_rows, device)
        self.device = field_views(self._buffer, FIELDS)
        # Unused elements of changed_entries point to the extra entry at the end.
        self._flat_tables = torch.zeros(max_rows * max_blocks + 1, dtype=torch.int32, device=device)
        self._tables = self._flat_tables[:-1].view(max_rows, max_blocks)  # int32 [max_rows, max_blocks]
        self._sent_tables: list[list[int]] = [[] for _ in range(max_rows)]  # by table index, what the device has
        self._seqs: list[Sequence] = []  # of the latest step, with their table indices and positions
        self._table_indices: list[int] = []
        self._positions: list[int] = []
        self._is_prepared = False

    def fill(self, batch: list[Scheduled]) -> None:
        """Copy the inputs of a step to the device. Row i holds the i-th item of the batch."""
        seqs, positions = [seq for seq, _ in batch], [end - 1 for end in end_positions(batch)]
        if not (self._is_prepared and seqs == self._seqs and positions == self._positions):
            self._begin(seqs, positions)
        self._is_prepared = False
        rows = list(zip(seqs, positions, strict=True))
        self._fields["input_ids"][: len(rows)] = [seq.input_id(position) for seq, position in rows]
        for row, (seq, position) in enumerate(rows):
            if seq.params.temperature > 0:
                self._fields["key"][row] = noise_key(seq.seed, seq.sample_index, position + 1)
        self._write_changes(seqs)
        self._host.copy_to(self._buffer)

    def prepare(self) -> None:
        """Guess the next step while the latest one runs: the same sequences, one token further."""
        latest = self._fields
        self._switch_buffers()
        for name, values in latest.items():
            self._fields[name][:] = values
        rows = len(self._seqs)
        for name in ("positions", "context_lens", "slot_mapping"):
            self._fields[name][:rows] += 1  # fill() corrects the slot if a new block begins
        self._positions = [position + 1 for position in self._positions]
        self._is_prepared = True

    def forget(self) -> None:
        """Make the next step send all tables again. Call this if the device may have missed changes."""
        self._seqs, self._table_indices, self._is_prepared = [], [], False

    def block_tables(self, rows: int) -> Tensor:
        """Apply the changes that fill() has sent, and return the tables of the first `rows` rows, [rows, max_blocks].

        This runs on the device, as part of the step.
        """
        self._flat_tables.index_copy_(0, self.device["changed_entries"], self.device["changed_blocks"])
        return self._tables.index_select(0, self.device["table_indices"][:rows])

    def _switch_buffers(self) -> None:
        """Switch to the other buffer, once its latest copy, which was for an earlier step, is done."""
        self._host, self._other_host = self._other_host, self._host
        self._host.wait()
        self._fields = self._host.fields

    def _begin(self, seqs: list[Sequence], positions: list[int]) -> None:
        """Write the inputs of a step from scratch, except those that fill() always writes."""
        if not self._is_prepared:
            self._switch_buffers()
        self._table_indices = self._assign_table_indices(seqs)
        self._seqs, self._positions = seqs, positions
        fields, rows = self._fields, len(seqs)
        fields["slot_mapping"][rows:], fields["context_lens"][rows:], fields["temperature"][rows:] = NO_SLOT, 0, 0
        fields["table_indices"][:rows], fields["positions"][:rows] = self._table_indices, positions
        fields["context_lens"][:rows] = [position + 1 for position in positions]
        fields["slot_mapping"][:rows] = [self._slot(*each) for each in zip(seqs, positions, strict=True)]
        for name, column in row_params(sampling_rows(seqs), torch.device("cpu"))._asdict().items():
            fields[name][:rows] = column[:, 0]

    def _slot(self, seq: Sequence, position: int) -> int:
        return seq.block_table[position // self._block_size] * self._block_size + position % self._block_size

    def _assign_table_indices(self, seqs: list[Sequence]) -> list[int]:
        """Return the index of each row's table: the one that its sequence had in the latest step, or a free one."""
        indices = {id(seq): index for seq, index in zip(self._seqs, self._table_indices, strict=True)}
        taken = {indices[id(seq)] for seq in seqs if id(seq) in indices}
        free = (index for index in range(self._max_rows) if index not in taken)
        for seq in seqs:
            if id(seq) not in indices:
                index = indices[id(seq)] = next(free)
                self._sent_tables[index] = []
        return [indices[id(seq)] for seq in seqs]

    def _write_changes(self, seqs: list[Sequence]) -> None:
        """Write the table entries that changed since they were sent, and the slots of rows whose table changed."""
        entries, blocks, changed_tables = list[int](), list[int](), set[int]()
        for row, (index, seq, position) in enumerate(zip(self._table_indices, seqs, self._positions, strict=True)):
            sent, table = self._sent_tables[index], seq.block_table
            if sent != table:
                first = len(sent) if sent == table[: len(sent)] else 0  # 0 after a preemption or a copied block
                self._sent_tables[index] = table.copy()
                entries += range(index * self._max_blocks + first, index * self._max_blocks + len(table))
                blocks += table[first:]
                changed_tables.add(index)
            if index in changed_tables or position % self._block_size == 0:
                self._fields["slot_mapping"][row] = self._slot(seq, position)
        limit = self._max_rows
        if len(entries) > limit:  # new sequences send whole tables; the overflow needs a separate copy
            overflow = torch.tensor(entries[limit:], dtype=torch.int64, device=self._flat_tables.device)
            overflow_blocks = torch.tensor(blocks[limit:], dtype=torch.int32, device=self._flat_tables.device)
            self._flat_tables.index_copy_(0, overflow, overflow_blocks)
        count = min(len(entries), limit)
        fields = self._fields
        fields["changed_entries"][:], fields["changed_blocks"][:] = len(self._flat_tables) - 1, 0
        fields["changed_entries"][:count], fields["changed_blocks"][:count] = entries[:count], blocks[:count]
