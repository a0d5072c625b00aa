"""StepInputs: what a decode step reads, at addresses that never change. It reaches the device in one copy a step.

    on the host, pinned    [input_ids | positions | slot_mapping | order | context_lens | changes of the block tables]
                                                    one copy, which nobody waits for
    on the device          the same, and the block tables [max_rows, max_blocks]

The tables stay on the device: a step tells only which blocks have come, mostly one for a sixteenth of the rows. So that
few rows change, a sequence keeps its row (its seat) as long as it runs; when one ends, the last takes its seat. Rows
without a sequence are padding: slot -1, context length 0.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from ...core.model_runner import Scheduled
from ...core.sequence import Sequence

NO_SLOT = -1
FIELDS = ("input_ids", "positions", "slot_mapping", "order", "places", "context_lens", "blocks")
LONGS = 5  # of them are int64, the others int32


class Views:
    """The fields of one buffer. input_ids, positions, slot_mapping int64 [max_rows]; context_lens int32 [max_rows];
    order int64 [max_rows]: the row of each sequence of the batch; places int64 and blocks int32 [max_rows]: which entry
    of the tables gets which block."""

    def __init__(self, max_rows: int, make: Callable[[int], Any]) -> None:
        """`make` gives a tensor of so many bytes."""
        sizes = [8 * max_rows] * LONGS + [4 * max_rows] * (len(FIELDS) - LONGS)
        self.buffer = make(sum(sizes))
        parts = self.buffer.split(sizes)
        dtypes = [torch.int64] * LONGS + [torch.int32] * (len(FIELDS) - LONGS)
        views = {name: part.view(dtype) for name, part, dtype in zip(FIELDS, parts, dtypes, strict=True)}
        self.input_ids, self.positions, self.slot_mapping, self.order = (views[name] for name in FIELDS[:4])
        self.places, self.context_lens, self.blocks = (views[name] for name in FIELDS[4:])

    def numpy(self) -> dict[str, np.ndarray]:
        """The same memory, where each number is written without an operation of torch's."""
        return {name: getattr(self, name).numpy() for name in FIELDS}


class StepInputs:
    def __init__(self, max_rows: int, max_blocks: int, block_size: int, device: torch.device) -> None:
        self._block_size, self._max_blocks, self._max_rows = block_size, max_blocks, max_rows
        is_cuda = device.type == "cuda"
        self._host = Views(max_rows, lambda size: torch.zeros(size, dtype=torch.uint8, pin_memory=is_cuda))
        self._numbers = self._host.numpy()
        self.device = Views(max_rows, lambda size: torch.zeros(size, dtype=torch.uint8, device=device))
        # one entry more than there are: changes that there are not go there
        self._flat = torch.zeros(max_rows * max_blocks + 1, dtype=torch.int32, device=device)
        self.block_tables = self._flat[:-1].view(max_rows, max_blocks)  # int32 [max_rows, max_blocks]
        self._copied = torch.cuda.Event() if is_cuda else None  # the host's buffer may be written again
        self._seats: list[Sequence | None] = []
        self._known: list[list[int]] = []  # by seat, the blocks that the device has of it

    def fill(self, batch: list[Scheduled]) -> list[int]:
        """Bring a step to the device. Returns the row of each sequence of the batch, all below len(batch)."""
        if self._copied:  # a step that samples nothing waits for nothing: its copy may still be under way
            self._copied.synchronize()
        rows = self._seated([seq for seq, _ in batch])
        numbers, size = self._numbers, self._block_size
        positions = [seq.num_computed_tokens for seq, _ in batch]
        numbers["slot_mapping"][:], numbers["context_lens"][:] = NO_SLOT, 0
        numbers["order"][: len(rows)] = rows
        numbers["input_ids"][rows] = [seq.token_ids[at] for (seq, _), at in zip(batch, positions, strict=True)]
        numbers["positions"][rows] = positions
        numbers["slot_mapping"][rows] = [
            seq.block_table[at // size] * size + at % size for (seq, _), at in zip(batch, positions, strict=True)
        ]
        numbers["context_lens"][rows] = [at + 1 for at in positions]
        held = zip(rows, batch, positions, strict=True)
        self._note_changes([(row, seq, at // size + 1) for row, (seq, _), at in held])
        self.device.buffer.copy_(self._host.buffer, non_blocking=True)
        if self._copied:
            self._copied.record()
        return rows

    def apply_changes(self) -> None:
        """A part of the step, on the device: what fill() has told of the tables."""
        self._flat.index_copy_(0, self.device.places, self.device.blocks)

    def _seated(self, seqs: list[Sequence]) -> list[int]:
        """A seat below len(seqs) for each; who has one keeps it."""
        num, still = len(seqs), set(map(id, seqs))
        seats = [seq if seq is not None and id(seq) in still else None for seq in self._seats]
        rows = {id(seq): row for row, seq in enumerate(seats[:num]) if seq is not None}
        free = (row for row in range(num) if row >= len(seats) or seats[row] is None)
        self._seats = seats[:num] + [None] * (num - len(seats))
        self._known += [[] for _ in range(num - len(self._known))]
        for seq in seqs:
            if id(seq) not in rows:
                row = rows[id(seq)] = next(free)
                self._seats[row], self._known[row] = seq, []
        return [rows[id(seq)] for seq in seqs]

    def _note_changes(self, held: list[tuple[int, Sequence, int]]) -> None:
        """Of each row: its sequence, and how many blocks the step reads. What the device lacks is told."""
        places, blocks = list[int](), list[int]()
        for row, seq, num_blocks in held:
            known, table = self._known[row], seq.block_table
            first = len(known) if known == table[: len(known)] else 0  # else it was preempted, or has copied a block
            if first < num_blocks:
                self._known[row] = table[:num_blocks]
                places += range(row * self._max_blocks + first, row * self._max_blocks + num_blocks)
                blocks += table[first:num_blocks]
        most = self._max_rows
        if len(places) > most:  # of sequences that are new here: a copy of its own
            places_there = torch.tensor(places[most:], dtype=torch.int64, device=self._flat.device)
            blocks_there = torch.tensor(blocks[most:], dtype=torch.int32, device=self._flat.device)
            self._flat.index_copy_(0, places_there, blocks_there)
        self._numbers["places"][:], self._numbers["blocks"][:] = len(self._flat) - 1, 0
        count = min(len(places), most)
        self._numbers["places"][:count], self._numbers["blocks"][:count] = places[:count], blocks[:count]
