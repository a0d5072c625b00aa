"""A ModelRunner that samples as the parameters ask, and tells log-probabilities beside the tokens."""

from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor

from ..backends.torch.attention import AttentionMetadata
from ..backends.torch.model_runner import ModelRunner as CoreModelRunner
from ..backends.torch.model_runner import Scheduled
from ..backends.torch.sampler import sample
from ..engine.sampling_params import SampledToken, SamplingRow
from ..backends.torch.logprobs import Logprob, named_logprobs, top_logprobs

MAX_LOGITS = 1 << 24

from .sequence import Sequence, ToldToken

SampleRows = Callable[[Tensor, list[SamplingRow]], list[SampledToken]]  # logits [num_rows, vocab_size]


class ModelRunner(CoreModelRunner):
    sample_rows: SampleRows = staticmethod(sample)  # which a faster one may stand for

    def sample(self, batch: list[Scheduled], hidden: Tensor, step: AttentionMetadata) -> list[SampledToken | None]:
        """As core does: a token for each sequence that is complete. hidden [num_tokens, hidden_size]"""
        seqs = [cast(Sequence, seq) for seq, _ in batch]
        complete = [i for i, seq in enumerate(seqs) if step.context_lens[i] == seq.num_tokens]
        logits = self.compute_logits(hidden, step, complete)  # [len(complete), vocab_size]
        tokens: list[SampledToken | None] = [None] * len(batch)
        for i, token in zip(
            complete, sample_and_tell(logits, [seqs[i] for i in complete], self.sample_rows), strict=True
        ):
            tokens[i] = token
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
        count, vocab_size = seq.params.prompt_logprobs, self._model.config.vocab_size
        told: list[dict[int, Logprob]] = []
        size = max(1, MAX_LOGITS // vocab_size)
        for row in range(max(start, 0), end, size):
            rows = hidden[row : min(row + size, end)]
            token_ids = seq.token_ids[seq.num_computed_tokens + row + 1 :][: len(rows)]
            told += top_logprobs(self._model.compute_logits(rows), token_ids, vocab_size if count == -1 else count)
        seq.tell_prompt(told)


def sample_and_tell(logits: Tensor, seqs: list[Sequence], sample_rows: SampleRows = sample) -> list[SampledToken]:
    """A token for each row, from what its processors leave; all logprobs are of the raw logits, [num_seqs, vocab_size].

    A row without processors, and without logprobs to tell, costs nothing beyond core's sample(). Raises
    FloatingPointError as it does, and ValueError if the processors leave no token.
    """
    try:
        tokens = sample_rows(process(logits, seqs), [seq.sampling_row() for seq in seqs])
    except FloatingPointError:
        if not logits.float().logsumexp(dim=-1).isfinite().all():
            raise
        names = "allowed_token_ids, bad_words, min_tokens, logit_bias, structured_outputs"
        raise ValueError(f"no token is left to sample from, behind {names}") from None
    for row, seq in enumerate(seqs):
        if seq.logits_processors:
            raw = logits[row].float()  # [vocab_size]
            logprob = raw[tokens[row].token_id] - raw.logsumexp(dim=-1)
            tokens[row] = tokens[row]._replace(logprob=logprob.item())
    for count in {seq.params.logprobs for seq in seqs} - {None}:
        rows = [row for row, seq in enumerate(seqs) if seq.params.logprobs == count]
        token_ids = [tokens[row].token_id for row in rows]
        found = top_logprobs(logits[rows], token_ids, logits.shape[1] if count == -1 else count)
        for row, told in zip(rows, found, strict=True):
            tokens[row] = ToldToken.of(tokens[row], told)
    for row, seq in enumerate(seqs):
        if seq.params.logprob_token_ids:
            asked = [*seq.params.logprob_token_ids, tokens[row].token_id]
            tokens[row] = ToldToken.of(tokens[row], named_logprobs(logits[row], asked))
    return tokens


def process(logits: Tensor, seqs: list[Sequence]) -> Tensor:
    """The rows to sample from. `logits` stay as they are. logits, out [num_seqs, vocab_size]"""
    if not any(seq.logits_processors for seq in seqs):
        return logits
    logits = logits.to(torch.float32, copy=True)
    for row, seq in zip(logits, seqs, strict=True):
        output_token_ids = seq.output_token_ids if seq.logits_processors else []
        for processor in seq.logits_processors:
            processor.apply(row, output_token_ids)
    return logits
