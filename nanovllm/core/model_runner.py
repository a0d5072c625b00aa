"""ModelRunner: from sequences to flat tensors, through the model, to the tokens sampled from it."""

import torch

from .attention import AttentionMetadata, PagedAttention, slots_of
from .block_manager import cdiv
from .llama import LlamaForCausalLM
from .sampling import SampledToken, sample, top_logprobs
from .sequence import Sequence

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
    def run(self, batch: list[Scheduled]) -> list[list[SampledToken]]:
        """Compute the next `num_tokens` tokens of each sequence, and sample from the last of those then complete.

        A token for each of its samplers(); none for a sequence that is not complete. The caller advances
        num_computed_tokens and appends the tokens.
        """
        rows = [(seq, seq.num_computed_tokens + i) for seq, num_tokens in batch for i in range(num_tokens)]
        input_ids = self._tensor([seq.token_ids[position] for seq, position in rows])  # [num_tokens]
        positions = self._tensor([position for _, position in rows])  # [num_tokens]
        step = self._metadata(batch, positions)
        self._attention.begin(step)
        hidden = self._model(input_ids, positions, self._attention)  # [num_tokens, hidden_size]
        self.num_steps, self.num_tokens = self.num_steps + 1, self.num_tokens + len(rows)

        complete = [i for i, (seq, _) in enumerate(batch) if step.context_lens[i] == seq.num_tokens]
        samplers = [(i, sampler) for i in complete for sampler in batch[i][0].samplers()]
        last_rows = self._tensor([step.query_start_loc[i + 1] - 1 for i, _ in samplers])  # [num_sampled]
        logits = self._model.compute_logits(hidden[last_rows])  # [num_sampled, vocab_size]
        self._tell_prompts(batch, hidden, step.query_start_loc)
        tokens: list[list[SampledToken]] = [[] for _ in batch]
        sampled = sample(logits, [sampler.sampling_row() for _, sampler in samplers])
        for (i, _), token in zip(samplers, sampled, strict=True):
            tokens[i].append(token)
        return tokens

    def _tell_prompts(self, batch: list[Scheduled], hidden: torch.Tensor, query_start_loc: list[int]) -> None:
        """Log-probabilities of the prompts' tokens, if they are asked for: a row has those of the token after it.

        hidden [num_tokens, hidden_size]
        """
        for (seq, num_tokens), row in zip(batch, query_start_loc, strict=False):
            first = 1 + len(seq.prompt_logprobs)  # the token of the prompt that is told next
            last = min(seq.num_computed_tokens + num_tokens, seq.num_prompt_tokens - 1)
            if seq.awaits_prompt_logprobs and first <= last:
                rows = hidden[row + first - 1 - seq.num_computed_tokens : row + last - seq.num_computed_tokens]
                logits = self._model.compute_logits(rows).float()  # [tokens told, vocab_size]
                token_ids, count = seq.token_ids[first : last + 1], seq.params.prompt_logprobs
                told = zip(logits, token_ids, strict=True)
                seq.prompt_logprobs += [top_logprobs(of_row, token_id, count) for of_row, token_id in told]

    def _metadata(self, batch: list[Scheduled], positions: torch.Tensor) -> AttentionMetadata:
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
            slot_mapping=slots_of(block_tables, seqs, positions, self._block_size),
            new_blocks=self._tensor(new_blocks),
        )

    def _block_tables(self, tables: list[list[int]]) -> torch.Tensor:
        """int64 [num_seqs, max_blocks]. Padding is the row's own last block: no other's memory is ever read."""
        width = max(len(table) for table in tables)
        return self._tensor([table + table[-1:] * (width - len(table)) for table in tables])

    def _tensor(self, values: list) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self._device)
