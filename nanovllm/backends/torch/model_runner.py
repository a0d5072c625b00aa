"""ModelRunner: from sequences to flat tensors, through the model, to one sampled token a sequence."""

from array import array

import torch
from torch import Tensor

from ...engine.block_manager import cdiv
from ...engine.sampling_params import SampledToken
from ...engine.sequence import Sequence
from ...llama import LlamaForCausalLM
from .attention import AttentionMetadata, PagedAttention, compute_slot_mapping
from .sampler import sample

Scheduled = tuple[Sequence, int]  # a sequence, and how many of its tokens to compute in this step


class ModelRunner:
    def __init__(
        self, model: LlamaForCausalLM, attention: PagedAttention, block_size: int, device: torch.device
    ) -> None:
        self._model = model
        self._attention = attention
        self._block_size = block_size
        self._device = device
        self.num_steps = 0
        self.num_tokens = 0  # through the model, since the start

    @torch.inference_mode()
    def run(self, batch: list[Scheduled]) -> list[SampledToken | None]:
        """Compute the next `num_tokens` tokens of each sequence; sample one more where that was the last one.

        None stands for a sequence that has more to compute. The caller advances num_computed_tokens and appends the
        tokens: if this raises, no sequence has changed, and its slots may be written again.
        """
        hidden, step = self.compute(batch)
        return self.sample(batch, hidden, step)

    def compute(self, batch: list[Scheduled]) -> tuple[Tensor, AttentionMetadata]:
        """A step of the model: the hidden state of each token, [num_tokens, hidden_size], and which token is whose."""
        rows = [(seq, seq.num_computed_tokens + i) for seq, num_tokens in batch for i in range(num_tokens)]
        input_ids = self._tensor([seq.token_ids[position] for seq, position in rows])  # [num_tokens]
        positions = self._tensor([position for _, position in rows])  # [num_tokens]
        step = self._metadata(batch, positions)
        hidden = self._model(input_ids, positions, self._attention.plan(step))  # [num_tokens, hidden_size]
        self.num_steps, self.num_tokens = self.num_steps + 1, self.num_tokens + len(rows)
        return hidden, step

    def sample(self, batch: list[Scheduled], hidden: Tensor, step: AttentionMetadata) -> list[SampledToken | None]:
        """A token for each sequence whose last token is in this step; None for the others."""
        complete = [i for i, (seq, _) in enumerate(batch) if step.context_lens[i] == seq.num_tokens]
        logits = self.compute_logits(hidden, step, complete)
        tokens: list[SampledToken | None] = [None] * len(batch)
        for i, token in zip(complete, sample(logits, [batch[i][0].sampling_row() for i in complete]), strict=True):
            tokens[i] = token
        return tokens

    def compute_logits(self, hidden: Tensor, step: AttentionMetadata, seqs: list[int]) -> Tensor:
        """The logits of the last token of each of `seqs`, given as numbers in the batch: [len(seqs), vocab_size]."""
        last_rows = self._tensor([step.query_start_loc[i + 1] - 1 for i in seqs])  # [len(seqs)]
        return self._model.compute_logits(hidden[last_rows])

    def _metadata(self, batch: list[Scheduled], positions: Tensor) -> AttentionMetadata:
        query_start_loc, context_lens, tables, new_blocks = [0], [], [], []
        for seq, num_tokens in batch:
            query_start_loc.append(query_start_loc[-1] + num_tokens)
            context_lens.append(seq.num_computed_tokens + num_tokens)
            tables.append(seq.block_table[: cdiv(context_lens[-1], self._block_size)])  # not those for later chunks
            new_blocks += tables[-1][cdiv(seq.num_computed_tokens, self._block_size) :]
        block_tables = self._block_tables(tables)
        seqs = self._tensor([i for i, (_, num_tokens) in enumerate(batch) for _ in range(num_tokens)])  # [num_tokens]
        return AttentionMetadata(
            query_start_loc=query_start_loc,
            context_lens=context_lens,
            block_tables=block_tables,
            slot_mapping=compute_slot_mapping(block_tables, seqs, positions, self._block_size),
            new_blocks=self._tensor(new_blocks),
        )

    def _block_tables(self, tables: list[list[int]]) -> Tensor:
        """int64 [num_seqs, max_blocks]. Padding is the row's own last block: no other's memory is ever read.

        No list of lists is made: torch would go through it number by number.
        """
        width, flat = max(len(table) for table in tables), array("q")
        for table in tables:
            flat += array("q", table + table[-1:] * (width - len(table)))
        return torch.frombuffer(flat, dtype=torch.int64).view(-1, width).to(self._device)

    def _tensor(self, values: list) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self._device)
