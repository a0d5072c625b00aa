"""GraphedDecodes: steps in which each sequence decodes one token, as CUDA graphs on memory that never moves."""

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from ...llama import LlamaForCausalLM
from .attention import Decodes, KernelAttend, Pool
from .graphs import Capture, DecodeGraphs
from .inputs import StepInputs
from .linear import Linears
from .split import LikeliestRoom

if TYPE_CHECKING:
    from ...engine.executor import Scheduled


class Decoded(NamedTuple):
    """The results of a step, a row for each sequence of its batch."""

    hidden: Tensor  # [num_seqs, hidden_size]
    logits: Tensor  # [num_seqs, vocab_size]
    likeliest: Tensor  # float32 [num_seqs, 3], of the logits: see find_likeliest() in plain.py


class GraphedDecodes:
    """The graphs, with the memory that they read and write."""

    def __init__(
        self,
        model: LlamaForCausalLM,
        linears: Linears,
        pool: Pool,
        max_model_len: int,
        sizes: list[int],
        capture: Capture,
        progress: bool = True,
    ) -> None:
        """`model` has a FusedModel in it. Raise what capturing may raise."""
        self._model, self._linears, self._pool, self.max_rows = model, linears, pool, sizes[-1]
        blocks, config = pool.blocks, model.config
        block_size, device = blocks.shape[3], blocks.device
        self.inputs = StepInputs(self.max_rows, -(-max_model_len // block_size), block_size, device)
        self._made = Decoded(
            blocks.new_empty(self.max_rows, config.hidden_size),
            blocks.new_empty(self.max_rows, config.vocab_size),
            blocks.new_empty(self.max_rows, 3, dtype=torch.float32),
        )
        self._decode_rooms = {rows: pool.decode_room(rows) for rows in sizes}
        self._likeliest_room = LikeliestRoom(self.max_rows, config.vocab_size, device)
        self.inputs.fill([])  # nothing but padding
        self._graphs = DecodeGraphs(self._step, sizes, capture, progress)

    def run(self, batch: "list[Scheduled]") -> Decoded:
        """Start a step of at most max_rows sequences. The next step overwrites its results."""
        rows = self.inputs.fill(batch)
        self._graphs.run(len(rows))
        if rows == list(range(len(rows))):
            return Decoded(*(made[: len(rows)] for made in self._made))
        order = self.inputs.device["order"][: len(rows)]  # it came with the step: nothing waits
        return Decoded(*(made.index_select(0, order) for made in self._made))

    def _step(self, rows: int) -> None:
        """Compute a step from its inputs to its results: a graph records this."""
        inputs, made = self.inputs.device, Decoded(*(made[:rows] for made in self._made))
        self.inputs.apply_changes()
        tables, context_lens = self.inputs.block_tables[:rows], inputs["context_lens"][:rows]
        decodes = Decodes(None, tables, context_lens, self._decode_rooms[rows])
        attend = KernelAttend(self._pool, inputs["slot_mapping"][:rows], decodes, None)
        made.hidden.copy_(self._model(inputs["input_ids"][:rows], inputs["positions"][:rows], attend))
        self._linears(self._model.lm_head, made.hidden, out=made.logits)
        self._pool.ops.find_likeliest(made.logits, self._likeliest_room, made.likeliest)
