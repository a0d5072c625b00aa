"""ModelRunner: from sequences to flat tensors, through the model, to one sampled token a sequence."""

import torch
from torch import Tensor

from .attention import AttentionMetadata, GatherAttention
from .llama import LlamaForCausalLM
from .sampling import SampledToken, sample
from .sequence import Sequence

Scheduled = tuple[Sequence, int]  # a sequence, and how many of its tokens to compute in this step


class ModelRunner:
    def __init__(
        self, model: LlamaForCausalLM, attention: GatherAttention, block_size: int, device: torch.device
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
        step = self._metadata(batch, rows)
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

    def _metadata(self, batch: list[Scheduled], rows: list[tuple[Sequence, int]]) -> AttentionMetadata:
        query_start_loc = [0]
        for _, num_tokens in batch:
            query_start_loc.append(query_start_loc[-1] + num_tokens)
        return AttentionMetadata(
            query_start_loc=query_start_loc,
            context_lens=[seq.num_computed_tokens + num_tokens for seq, num_tokens in batch],
            block_tables=[self._tensor(seq.block_table) for seq, _ in batch],
            slot_mapping=self._tensor([self._slot(seq, position) for seq, position in rows]),
        )

    def _slot(self, seq: Sequence, position: int) -> int:
        """The slot of the token at `position`: block * block_size + offset."""
        return seq.block_table[position // self._block_size] * self._block_size + position % self._block_size

    def _tensor(self, values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self._device)
