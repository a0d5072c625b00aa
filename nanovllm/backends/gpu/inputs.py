"""StepInputs: what a decode step reads, at addresses that never change. It reaches the device in one copy a step.

    on the host, pinned    [input_ids | positions | slot_mapping | order | context_lens | changes of the block tables]
                                                    one copy, which nobody waits for
    on the device          the same, and the block tables [max_rows, max_blocks]

The tables stay on the device: a step tells only which blocks have come, mostly one for a sixteenth of the rows. So that
few rows change, a sequence keeps its row (its seat) as long as it runs; when one ends, the last takes its seat. Rows
without a sequence are padding: slot -1, context length 0.

While the device computes, the next step is prepared: prepare() guesses that the same sequences decode one more token.
fill() compares, and then has little left to write. What was guessed wrong is made anew.
"""

from typing import TYPE_CHECKING

import torch

from .fields import fields_of, numbers_of, room_for

if TYPE_CHECKING:
    from ...engine.executor import Scheduled
    from ...engine.sequence import Sequence

NO_SLOT = -1
DTYPES = {
    "input_ids": torch.int64,  # [max_rows], as all of them
    "positions": torch.int64,
    "slot_mapping": torch.int64,
    "order": torch.int64,  # the row of each sequence of the batch
    "places": torch.int64,  # which entries of the tables change,
    "context_lens": torch.int32,
    "blocks": torch.int32,  # and what they become
}


class StepInputs:
    def __init__(self, max_rows: int, max_blocks: int, block_size: int, device: torch.device) -> None:
        self._block_size, self._max_blocks, self._max_rows = block_size, max_blocks, max_rows
        is_cuda = device.type == "cuda"
        self._host = room_for(DTYPES, max_rows, torch.device("cpu"), is_pinned=is_cuda)
        self._numbers = numbers_of(self._host, DTYPES)
        self._buffer = room_for(DTYPES, max_rows, device)
        self.device = fields_of(self._buffer, DTYPES)
        # one entry more than there are: changes that there are not go there
        self._flat = torch.zeros(max_rows * max_blocks + 1, dtype=torch.int32, device=device)
        self.block_tables = self._flat[:-1].view(max_rows, max_blocks)  # int32 [max_rows, max_blocks]
        self._copied = torch.cuda.Event() if is_cuda else None  # the host's buffer may be written again
        self._seats: list[Sequence | None] = []
        self._known: list[list[int]] = []  # by seat, the blocks that the device has of it
        self._seqs: list[Sequence] = []  # of the last step, with their rows and positions
        self._rows: list[int] = []
        self._positions: list[int] = []
        self._is_prepared = False

    def fill(self, batch: "list[Scheduled]") -> list[int]:
        """Bring a step to the device. Returns the row of each sequence of the batch, all below len(batch)."""
        seqs = [seq for seq, _ in batch]
        positions = [seq.num_computed_tokens for seq in seqs]
        if not (self._is_prepared and seqs == self._seqs and positions == self._positions):
            self._begin(seqs, positions)
        self._is_prepared = False
        numbers, rows = self._numbers, self._rows
        numbers["input_ids"][rows] = [seq.token_ids[at] for seq, at in zip(seqs, positions, strict=True)]
        self._note_changes(seqs)
        self._buffer.copy_(self._host, non_blocking=True)
        if self._copied:
            self._copied.record()
        return rows

    def prepare(self) -> None:
        """Guess the next step, while the last one runs: each of its sequences one token further."""
        self._wait_for_copy()
        rows = len(self._rows)
        for name in ("positions", "context_lens", "slot_mapping"):
            self._numbers[name][:rows] += 1  # a slot in the same block, or fill() puts it right
        self._positions = [position + 1 for position in self._positions]
        self._is_prepared = True

    def apply_changes(self) -> None:
        """Apply the changes of the tables that fill() has sent: a part of the step, on the device."""
        self._flat.index_copy_(0, self.device["places"], self.device["blocks"])

    def _wait_for_copy(self) -> None:
        """Wait for the last copy. It was started before the step that runs now: mostly it is over."""
        if self._copied:
            self._copied.synchronize()

    def _begin(self, seqs: "list[Sequence]", positions: list[int]) -> None:
        """Prepare a step as if there had been none before."""
        self._wait_for_copy()
        self._seqs, self._positions, self._rows = seqs, positions, self._seated(seqs)
        numbers, rows = self._numbers, self._rows
        numbers["slot_mapping"][:], numbers["context_lens"][:] = NO_SLOT, 0
        numbers["order"][: len(rows)] = rows
        numbers["positions"][rows] = positions
        numbers["context_lens"][rows] = [at + 1 for at in positions]
        numbers["slot_mapping"][rows] = [self._slot(seq, at) for seq, at in zip(seqs, positions, strict=True)]

    def _slot(self, seq: "Sequence", position: int) -> int:
        return seq.block_table[position // self._block_size] * self._block_size + position % self._block_size

    def _seated(self, seqs: "list[Sequence]") -> list[int]:
        """Return a seat below len(seqs) for each sequence. One that has a seat keeps it."""
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

    def _note_changes(self, seqs: "list[Sequence]") -> None:
        """Note the blocks that are new to the device, and correct the slots of rows that begin a block."""
        places, blocks, size = list[int](), list[int](), self._block_size
        for row, seq, position in zip(self._rows, seqs, self._positions, strict=True):
            known, table = self._known[row], seq.block_table
            if known == table and position % size:
                continue
            first = len(known) if known == table[: len(known)] else 0  # else it was preempted, or has copied a block
            self._known[row] = table.copy()
            self._numbers["slot_mapping"][row] = self._slot(seq, position)
            places += range(row * self._max_blocks + first, row * self._max_blocks + len(table))
            blocks += table[first:]
        most = self._max_rows
        if len(places) > most:  # of sequences that are new here: a copy of its own
            places_there = torch.tensor(places[most:], dtype=torch.int64, device=self._flat.device)
            blocks_there = torch.tensor(blocks[most:], dtype=torch.int32, device=self._flat.device)
            self._flat.index_copy_(0, places_there, blocks_there)
        self._numbers["places"][:], self._numbers["blocks"][:] = len(self._flat) - 1, 0
        count = min(len(places), most)
        self._numbers["places"][:count], self._numbers["blocks"][:count] = places[:count], blocks[:count]
