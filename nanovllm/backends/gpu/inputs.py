"""StepInputs: the inputs of decode steps, at fixed addresses. One copy per step sends them to the device.

    host, pinned    [input_ids | positions | ... | sampling parameters | table indices | changed block table entries]
                                                    one asynchronous copy
    device          the same, and the block tables [max_rows, max_blocks]

Rows are in the order of the batch. Block tables stay on the device: a step sends only the entries that changed, usually
one for every 16 rows. To keep changes rare, a sequence's table stays at the same index while the sequence runs, even
if its row changes. Rows without a sequence are padding: slot -1, context length 0, temperature 0.

The host writes whole columns with numpy, and looks at a sequence only to read its numbers. It has two buffers, because
the latest step's copy may not have started when it writes the next inputs.
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
    "changed_entries": torch.int64,  # indices into the flat block tables
    **SAMPLING_FIELDS,
    "context_lens": torch.int32,  # this field and the next two are in the order in which programs take rows
    "rows": torch.int32,
    "table_indices": torch.int32,  # where the rows' block tables are
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
        self.indices: np.ndarray | None = None  # the table indices of its rows
        self.order = np.zeros(0, dtype=np.int64)  # the rows, those with the longest contexts first
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
        self._buffer = allocate_fields(FIELDS, max_rows, device)
        self.device = field_views(self._buffer, FIELDS)
        # Unused elements of changed_entries point to the extra entry at the end.
        self._flat_tables = torch.zeros(max_rows * max_blocks + 1, dtype=torch.int32, device=device)
        self._tables = self._flat_tables[:-1].view(max_rows, max_blocks)  # int32 [max_rows, max_blocks]
        self._seqs: list[Sequence] = []  # of the latest step, and the indices of their tables
        self._indices = np.zeros(0, dtype=np.int64)
        self._drawn: list[int] = []  # rows of the latest step that are not greedy
        self._has_drafts = False  # then a sequence has several rows
        # By table index: what the device has, from which list, how much of it, and the sampling parameters
        self._sent = np.zeros((max_rows, max_blocks), dtype=np.int32)
        self._sent_from: list[list[int]] = [[] for _ in range(max_rows)]
        self._num_sent = [0] * max_rows
        self._sampling = {name: np.zeros(max_rows, self._host.fields[name].dtype) for name in SAMPLING_FIELDS}

    def fill(self, batch: list[Scheduled]) -> None:
        """Copy the inputs of a step to the device. Row i holds the i-th item of the batch."""
        self._host, self._other_host = self._other_host, self._host
        self._host.wait()  # until its latest copy, which was for the step before the latest one, is done
        seqs, rows, fields = [seq for seq, _ in batch], len(batch), self._host.fields
        if seqs != self._seqs:
            self._assign_indices(seqs)
        indices = self._indices
        if self._has_drafts:
            starts = [end - 1 for end in end_positions(batch)]
            fields["input_ids"][:rows] = [seq.input_id(start) for seq, start in zip(seqs, starts, strict=True)]
        else:  # input_id() and num_launched_tokens, written out: this runs for each token
            starts = [seq.num_computed_tokens + seq.num_in_flight_tokens for seq in seqs]
            fields["input_ids"][:rows] = [
                seq.token_ids[start] if start < len(seq.token_ids) else seq.placeholder_id
                for seq, start in zip(seqs, starts, strict=True)
            ]
        positions = np.array(starts, dtype=np.int64)
        self._write_changes(seqs)
        fields["positions"][:rows] = positions
        places, offsets = np.divmod(positions, self._block_size)
        fields["slot_mapping"][:rows] = self._sent[indices, places] * self._block_size + offsets
        if self._host.indices is not indices:  # other rows than when this buffer was filled last
            self._host.indices, self._host.order = indices, np.argsort(-positions, kind="stable")
            fields["rows"][:rows], fields["rows"][rows:] = self._host.order, np.arange(rows, self._max_rows)
            fields["table_indices"][:rows] = indices[self._host.order]
            for name, values in self._sampling.items():
                fields[name][:rows] = values[indices]
            fields["slot_mapping"][rows:], fields["context_lens"][rows:], fields["temperature"][rows:] = NO_SLOT, 0, 0
        fields["context_lens"][:rows] = positions[self._host.order] + 1
        for row in self._drawn:
            fields["key"][row] = noise_key(seqs[row].seed, seqs[row].sample_index, starts[row] + 1)
        self._host.copy_to(self._buffer)

    def forget(self) -> None:
        """Make the next step send all tables again. Call this if the device may have missed changes."""
        self._seqs, self._indices, self._drawn = [], np.zeros(0, dtype=np.int64), []

    def block_tables(self) -> Tensor:
        """Apply the changes that fill() has sent, and return the tables, [max_rows, max_blocks].

        This runs on the device, as part of the step.
        """
        self._flat_tables.index_copy_(0, self.device["changed_entries"], self.device["changed_blocks"])
        return self._tables

    def _assign_indices(self, seqs: list[Sequence]) -> None:
        """Give each sequence the index of its table: the one that it had in the latest step, or a free one."""
        known = dict(zip(map(id, self._seqs), self._indices.tolist(), strict=True))
        indices = {id(seq): known[id(seq)] for seq in seqs if id(seq) in known}
        taken, new = {*indices.values()}, list[Sequence]()
        free = (index for index in range(self._max_rows) if index not in taken)
        for seq in seqs:
            if id(seq) not in indices:
                indices[id(seq)] = index = next(free)
                self._sent_from[index], self._num_sent[index] = [], 0
                new.append(seq)
        if new:
            at = [indices[id(seq)] for seq in new]
            for name, column in row_params(sampling_rows(new), torch.device("cpu"))._asdict().items():
                self._sampling[name][at] = column[:, 0]
        self._seqs, self._indices = seqs, np.array([indices[id(seq)] for seq in seqs], dtype=np.int64)
        self._drawn = np.flatnonzero(self._sampling["temperature"][self._indices]).tolist()
        self._has_drafts = len(indices) < len(seqs)

    def _write_changes(self, seqs: list[Sequence]) -> None:
        """Write the table entries that changed since they were sent."""
        entries, blocks, sent_from, num_sent = list[int](), list[int](), self._sent_from, self._num_sent
        for seq, index in zip(seqs, self._indices.tolist(), strict=True):
            table = seq.block_table
            if len(table) == num_sent[index] and table is sent_from[index]:
                continue
            first = num_sent[index]
            if table is not sent_from[index]:  # it was admitted again, or has its own copy of its last block
                both = zip(self._sent[index, :first].tolist(), table, strict=False)
                first = next((i for i, (old, new) in enumerate(both) if old != new), min(first, len(table)))
            entries += range(index * self._max_blocks + first, index * self._max_blocks + len(table))
            blocks += table[first:]
            self._sent[index, first : len(table)] = table[first:]
            sent_from[index], num_sent[index] = table, len(table)
        limit = self._max_rows
        if len(entries) > limit:  # new sequences send whole tables; the overflow needs a separate copy
            overflow = torch.tensor(entries[limit:], dtype=torch.int64, device=self._flat_tables.device)
            overflow_blocks = torch.tensor(blocks[limit:], dtype=torch.int32, device=self._flat_tables.device)
            self._flat_tables.index_copy_(0, overflow, overflow_blocks)
        count, fields = min(len(entries), limit), self._host.fields
        fields["changed_entries"][:], fields["changed_blocks"][:] = len(self._flat_tables) - 1, 0
        fields["changed_entries"][:count], fields["changed_blocks"][:count] = entries[:count], blocks[:count]
