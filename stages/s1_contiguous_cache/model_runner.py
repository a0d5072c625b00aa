"""ModelRunner: from sequences to flat tensors, through the model, to one sampled token for each sequence."""

from itertools import accumulate

import torch
from torch import Tensor

from .attention import AttentionMetadata, ContiguousAttention
from .llama import LlamaForCausalLM
from .sampling import SampledToken, sample
from .sequence import Sequence

Scheduled = tuple[Sequence, int]  # a sequence, and how many of its tokens to compute in this step


class ModelRunner:
    """The model, and what it needs to run one step."""

    def __init__(self, model: LlamaForCausalLM, attention: ContiguousAttention, device: torch.device) -> None:
        self._model = model
        self._attention = attention
        self._device = device
        self.num_steps = 0
        self.num_tokens = 0  # computed since the start

    @torch.inference_mode()
    def run(self, batch: list[Scheduled]) -> list[SampledToken]:
        """Compute the next `num_tokens` tokens of each sequence, and sample the token that follows.

        Sequences do not change: the caller advances num_computed_tokens and appends the sampled tokens.
        """
        return sample(self.compute_logits(batch), [seq.sampling_row() for seq, _ in batch])

    @torch.inference_mode()
    def compute_logits(self, batch: list[Scheduled]) -> Tensor:
        """Run the model. Return the logits after the last token of each sequence, [num_seqs, vocab_size].

        The tokens of a step lie flat, sequence by sequence. Count the step in num_steps, and its tokens in num_tokens.
        """
        rows = [(seq, seq.num_computed_tokens + i) for seq, num_tokens in batch for i in range(num_tokens)]
        input_ids = self._tensor([seq.token_ids[position] for seq, position in rows])  # [num_tokens]
        positions = self._tensor([position for _, position in rows])  # [num_tokens]
        step = AttentionMetadata(
            query_start_loc=[0, *accumulate(num_tokens for _, num_tokens in batch)],
            context_lens=[seq.num_computed_tokens + num_tokens for seq, num_tokens in batch],
            first_slots=[seq.slots.start for seq, _ in batch],
            slot_mapping=self._tensor([seq.slots.start + position for seq, position in rows]),
        )
        hidden = self._model(input_ids, positions, self._attention.plan(step))  # [num_tokens, hidden_size]
        self.num_steps, self.num_tokens = self.num_steps + 1, self.num_tokens + len(rows)
        last_rows = self._tensor(step.query_start_loc[1:]) - 1  # [num_seqs]
        return self._model.compute_logits(hidden[last_rows])

    def _tensor(self, values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self._device)
