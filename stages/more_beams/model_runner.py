"""ModelRunner: from sequences to flat tensors, through the model, to one sampled token for each sequence."""

from itertools import accumulate

import torch
from torch import Tensor

from .attention import AttentionMetadata, PagedAttention
from .block_manager import cdiv
from .llama import LlamaForCausalLM
from .sampling import SampledToken, sample
from .sequence import Sequence

Scheduled = tuple[Sequence, int]  # a sequence, and how many of its tokens to compute in this step


class ModelRunner:
    """The model, and what it needs to run one step."""

    def __init__(
        self, model: LlamaForCausalLM, attention: PagedAttention, block_size: int, device: torch.device
    ) -> None:
        self._model = model
        self._attention = attention
        self._block_size = block_size
        self._device = device
        self.num_steps = 0
        self.num_tokens = 0  # computed since the start

    @torch.inference_mode()
    def run(self, batch: list[Scheduled]) -> list[SampledToken | None]:
        """Compute the next `num_tokens` tokens of each sequence, and sample the token that follows its last one.

        A sequence with more tokens to compute gets None. Sequences do not change: the caller advances
        num_computed_tokens and appends the sampled tokens.
        """
        logits = self.compute_logits(batch)  # [num_seqs, vocab_size]
        complete = [i for i, (seq, num_tokens) in enumerate(batch) if seq.num_uncomputed_tokens == num_tokens]
        sampled = sample(logits[complete], [batch[i][0].sampling_row() for i in complete]) if complete else []
        tokens: list[SampledToken | None] = [None] * len(batch)
        for i, token in zip(complete, sampled, strict=True):
            tokens[i] = token
        return tokens

    @torch.inference_mode()
    def compute_logits(self, batch: list[Scheduled]) -> Tensor:
        """Run the model. Return the logits after the last token of each sequence, [num_seqs, vocab_size].

        The tokens of a step lie flat, sequence by sequence. Count the step in num_steps, and its tokens in num_tokens.
        """
        rows = [(seq, seq.num_computed_tokens + i) for seq, num_tokens in batch for i in range(num_tokens)]
        input_ids = self._tensor([seq.token_ids[position] for seq, position in rows])  # [num_tokens]
        positions = self._tensor([position for _, position in rows])  # [num_tokens]
        step = self._metadata(batch, rows)
        hidden = self._model(input_ids, positions, self._attention.plan(step))  # [num_tokens, hidden_size]
        self.num_steps, self.num_tokens = self.num_steps + 1, self.num_tokens + len(rows)
        last_rows = self._tensor(step.query_start_loc[1:]) - 1  # [num_seqs]
        return self._model.compute_logits(hidden[last_rows])

    def _metadata(self, batch: list[Scheduled], rows: list[tuple[Sequence, int]]) -> AttentionMetadata:
        """Describe the step for attention. `rows` has the sequence and the position of each token."""
        context_lens, tables, new_blocks = [], [], []
        for seq, num_tokens in batch:
            context_lens.append(seq.num_computed_tokens + num_tokens)
            tables.append(seq.block_table[: cdiv(context_lens[-1], self._block_size)])
            new_blocks += tables[-1][cdiv(seq.num_computed_tokens, self._block_size) :]
        width = max(map(len, tables))
        return AttentionMetadata(
            query_start_loc=[0, *accumulate(num_tokens for _, num_tokens in batch)],
            context_lens=context_lens,
            block_tables=self._tensor([table + table[-1:] * (width - len(table)) for table in tables]),
            slot_mapping=self._tensor([self._slot(seq, position) for seq, position in rows]),
            new_blocks=self._tensor(new_blocks),
        )

    def _slot(self, seq: Sequence, position: int) -> int:
        """Return the slot of a token: block * block_size + offset."""
        return seq.block_table[position // self._block_size] * self._block_size + position % self._block_size

    def _tensor(self, values: list) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self._device)
