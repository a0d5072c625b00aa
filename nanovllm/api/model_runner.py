"""A ModelRunner that tells log-probabilities beside the tokens that it samples."""

from typing import Any, cast

from torch import Tensor

from ..core.attention import AttentionMetadata
from ..core.model_runner import ModelRunner as CoreModelRunner
from ..core.model_runner import Scheduled
from ..core.sampling import SampledToken
from .logprobs import MAX_LOGITS, Logprob, top_logprobs
from .sequence import Sequence, ToldToken


class ModelRunner(CoreModelRunner):
    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        self._sampled_from: Tensor | None = None  # [num_sampled, vocab_size], of the last step

    def compute_logits(self, hidden: Tensor, step: AttentionMetadata, seqs: list[int]) -> Tensor:
        self._sampled_from = super().compute_logits(hidden, step, seqs)
        return self._sampled_from

    def sample(self, batch: list[Scheduled], hidden: Tensor, step: AttentionMetadata) -> list[SampledToken | None]:
        """As core does: a token for each sequence that is complete. hidden [num_tokens, hidden_size]"""
        tokens = super().sample(batch, hidden, step)
        seqs = [cast(Sequence, seq) for seq, _ in batch]
        complete = [i for i, token in enumerate(tokens) if token is not None]  # a row of _sampled_from each
        counts = [seqs[i].params.logprobs for i in complete]
        for count in {*counts} - {None}:
            rows = [row for row, asked in enumerate(counts) if asked == count]
            token_ids = [tokens[complete[row]].token_id for row in rows]
            for row, found in zip(rows, top_logprobs(self._sampled_from[rows], token_ids, count), strict=True):
                tokens[complete[row]] = ToldToken.of(tokens[complete[row]], found)
        for i, seq in enumerate(seqs):
            if seq.awaits_prompt_logprobs:
                self._tell_prompt(seq, hidden[step.query_start_loc[i] : step.query_start_loc[i + 1]])
        return tokens

    def _tell_prompt(self, seq: Sequence, hidden: Tensor) -> None:
        """A row tells the token after it. hidden [num_tokens, hidden_size], of the tokens that are computed now.

        What an earlier step has told is not told again: the prompt of a preempted sequence is computed twice.
        """
        first = 1 + len(seq.prompt_logprobs)  # the token that is told next
        start = first - 1 - seq.num_computed_tokens  # its row
        end = min(len(hidden), seq.num_prompt_tokens - 1 - seq.num_computed_tokens)
        told: list[dict[int, Logprob]] = []
        size = max(1, MAX_LOGITS // self._model.config.vocab_size)
        for row in range(max(start, 0), end, size):
            rows = hidden[row : min(row + size, end)]
            token_ids = seq.token_ids[seq.num_computed_tokens + row + 1 :][: len(rows)]
            told += top_logprobs(self._model.compute_logits(rows), token_ids, seq.params.prompt_logprobs)
        seq.prompt_logprobs += told
