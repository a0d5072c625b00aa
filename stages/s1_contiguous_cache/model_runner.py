"""ModelRunner: from sequences to flat tensors, through the model, to one sampled token a sequence."""

import torch

from .attention import AttentionMetadata, ContiguousAttention
from .llama import LlamaForCausalLM
from .sampling import SampledToken, sample
from .sequence import Sequence

Scheduled = tuple[Sequence, int]  # a sequence, and how many of its tokens to compute in this step


class ModelRunner:
    def __init__(self, model: LlamaForCausalLM, attention: ContiguousAttention, device: torch.device) -> None:
        self._model = model
        self._attention = attention
        self._device = device
        self.num_steps = 0
        self.num_tokens = 0  # through the model, since the start

    @torch.inference_mode()
    def run(self, batch: list[Scheduled]) -> list[SampledToken | None]:
        """Compute the next `num_tokens` tokens of each sequence; sample where that reaches the sequence's end."""
        rows = [(seq, position) for seq, num_tokens in batch for position in computed_now(seq, num_tokens)]
        input_ids = self._tensor([seq.token_ids[position] for seq, position in rows])  # [num_tokens]
        positions = self._tensor([position for _, position in rows])  # [num_tokens]
        self._attention.begin(self._metadata(batch, rows))
        hidden = self._model(input_ids, positions, self._attention)  # [num_tokens, hidden_size]
        ends = [i for i, (seq, position) in enumerate(rows) if position == seq.num_tokens - 1]
        logits = self._model.compute_logits(hidden[self._tensor(ends)])  # [num_sampled, vocab_size]
        sampled = iter(sample(logits, [rows[i][0].sampling_row() for i in ends]))
        self.num_steps, self.num_tokens = self.num_steps + 1, self.num_tokens + len(rows)
        return [next(sampled) if reaches_end(seq, num_tokens) else None for seq, num_tokens in batch]

    def _metadata(self, batch: list[Scheduled], rows: list[tuple[Sequence, int]]) -> AttentionMetadata:
        query_start_loc = [0]
        for _, num_tokens in batch:
            query_start_loc.append(query_start_loc[-1] + num_tokens)
        return AttentionMetadata(
            query_start_loc=query_start_loc,
            context_lens=[seq.num_computed_tokens + num_tokens for seq, num_tokens in batch],
            first_slots=[seq.slots.start for seq, _ in batch],
            slot_mapping=self._tensor([seq.slots.start + position for seq, position in rows]),
        )

    def _tensor(self, values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self._device)


def computed_now(seq: Sequence, num_tokens: int) -> range:
    """Positions of the tokens that a step computes."""
    return range(seq.num_computed_tokens, seq.num_computed_tokens + num_tokens)


def reaches_end(seq: Sequence, num_tokens: int) -> bool:
    return seq.num_computed_tokens + num_tokens == seq.num_tokens
