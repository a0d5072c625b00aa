"""ModelRunner runs the model on a batch of sequences, and samples a token for each of them."""

from collections.abc import Callable
from functools import partial
from itertools import groupby

import torch
from torch import Tensor

from ...engine.executor import FinishedStep, Scheduled, must_read_first
from ...engine.sequence import Sequence
from ...llama import LlamaForCausalLM
from ...profiling import step_range
from ...requests.tokens import Logprob, PoolerOutput, SampledToken, SamplingRow, StepOutput
from .attention import PagedAttention
from .backend import Backend, Computed, SamplerAhead, TorchBackend, end_positions, tensor_of
from .pooler import pool
from .sampler import named_logprobs, sample, top_logprobs

MAX_PROMPT_LOGITS = 1 << 24  # logits computed at a time for prompt_logprobs: long chunks are split to save memory


class SampledStep:
    """A Pending for a step that still runs on the device. `read` waits for the tokens of the items in `complete`."""

    def __init__(self, num_items: int, complete: list[int], read: Callable[[], StepOutput]) -> None:
        self._num_items, self._complete, self._read = num_items, complete, read

    def tokens(self) -> StepOutput:
        return self._read().spread(self._complete, self._num_items)


class ModelRunner:
    """An Executor that runs each step as soon as it is launched."""

    def __init__(
        self, model: LlamaForCausalLM, attention: PagedAttention, block_size: int, device: torch.device
    ) -> None:
        self.model = model
        self.backend: Backend = TorchBackend(model, attention, block_size, device)
        self._device = device
        self.num_steps = 0
        self.num_tokens = 0  # computed since the engine started

    def launch(self, batch: list[Scheduled], num_decodes: int = 0) -> FinishedStep | SampledStep:
        """Run a step. If it fails, tokens() of the result raises the error.

        If the backend can sample without the host, return while the device is still computing.
        """
        try:
            if self.backend.ahead is not None and not must_read_first(batch):
                return self._start(batch, self.backend.ahead, num_decodes)
            return FinishedStep(self.run(batch))
        except Exception as error:
            return FinishedStep.failed(error)

    @torch.inference_mode()
    def _start(self, batch: list[Scheduled], ahead: SamplerAhead, num_decodes: int) -> SampledStep:
        """Start a step that needs no logits processors, embeddings or logprobs."""
        computed, complete = self.compute(batch), complete_items(batch, num_decodes)
        if not complete:
            return SampledStep(len(batch), [], partial(StepOutput, [], []))
        seqs = [batch[i][0] for i in complete]
        with step_range("sample"), self.backend.sampling(computed):
            logits = self.compute_logits(computed, complete)
            read = ahead.start_sampling(logits, seqs)
            tokens = self.backend.sample(logits, sampling_rows(seqs)) if read is None else StepOutput([], [])
        for row, seq in enumerate(seqs):
            seq.placeholder_id = tokens.token_ids[row] if read is None else ~row
        return SampledStep(len(batch), complete, read or (lambda: tokens))

    @torch.inference_mode()
    def run(self, batch: list[Scheduled]) -> StepOutput:
        """Run the model on the next `num_tokens` tokens of each item, and sample the token that follows them.

        A sequence with pooling_params gets the embedding of its prompt instead, and a sequence with more tokens to
        compute gets nothing. Sequences change only in prompt_logprobs and placeholder_id: the caller advances
        num_computed_tokens and appends the sampled tokens.
        """
        computed, complete = self.compute(batch), complete_items(batch)
        pooled = {i: params for i in complete if (params := batch[i][0].pooling_params) is not None}
        complete = [i for i in complete if i not in pooled] if pooled else complete
        outputs, embeddings = StepOutput([], []), list[PoolerOutput]()
        with step_range("sample"), self.backend.sampling(computed):
            if complete:
                logits = self.compute_logits(computed, complete)  # [num_complete, vocab_size]
                seqs = [batch[i][0] for i in complete]
                outputs = sample_with_logprobs(logits, seqs, self.backend.sample)
                for seq, token_id in zip(seqs, outputs.token_ids, strict=True):
                    seq.placeholder_id = token_id
            if pooled:
                embeddings = pool(self._last_hidden(computed, [*pooled]), [*pooled.values()])
            for i, seq in [(i, seq) for i, (seq, _) in enumerate(batch) if not seq.is_plain]:
                if seq.awaits_prompt_logprobs:
                    hidden = computed.hidden[computed.query_start_loc[i] : computed.query_start_loc[i + 1]]
                    seq.add_prompt_logprobs(self._prompt_logprobs(seq, hidden))
        return outputs.spread(complete, len(batch), dict(zip(pooled, embeddings, strict=True)))

    @torch.inference_mode()
    def compute(self, batch: list[Scheduled]) -> Computed:
        """Run the model on a batch, and count the step and its tokens."""
        computed = self.backend.compute(batch)
        self.num_steps, self.num_tokens = self.num_steps + 1, self.num_tokens + computed.query_start_loc[-1]
        return computed

    @torch.inference_mode()
    def compute_logits(self, computed: Computed, items: list[int]) -> Tensor:
        """Return the logits [len(items), vocab_size] after the last token of the items with these batch indices."""
        if computed.logits is not None:
            return computed.logits if len(items) == len(computed.logits) else computed.logits[items]
        return self.backend.compute_logits(self._last_hidden(computed, items))

    def next_logits(self, batch: list[Scheduled]) -> Tensor:
        """Run a step without sampling. Return the logits after the last token of each item."""
        return self.compute_logits(self.compute(batch), list(range(len(batch))))  # [batch size, vocab_size]

    def _prompt_logprobs(self, seq: Sequence, hidden: Tensor) -> list[dict[int, Logprob]]:
        """Return the log-probabilities of the prompt tokens that this step predicts.

        Each row of `hidden` [num_tokens, hidden_size] predicts the token after it. A preempted sequence computes its
        prompt again, so tokens that already have log-probabilities are skipped.
        """
        start = max(len(seq.prompt_logprobs) - seq.num_computed_tokens, 0)  # this row predicts the first missing one
        end = min(len(hidden), seq.num_prompt_tokens - 1 - seq.num_computed_tokens)
        vocab_size, count = self.model.config.vocab_size, seq.params.prompt_logprobs
        assert count is not None, "the request has no prompt_logprobs"
        logprobs: list[dict[int, Logprob]] = []
        size = max(1, MAX_PROMPT_LOGITS // vocab_size)
        for row in range(start, end, size):
            rows = hidden[row : min(row + size, end)]  # [at most size, hidden_size]
            token_ids = seq.token_ids[seq.num_computed_tokens + row + 1 :][: len(rows)]
            logprobs += top_logprobs(self.backend.compute_logits(rows), token_ids, vocab_size if count == -1 else count)
        return logprobs

    def _last_hidden(self, computed: Computed, items: list[int]) -> Tensor:
        """Return the hidden states [len(items), hidden_size] of the last tokens of these items."""
        last_rows = tensor_of([computed.query_start_loc[i + 1] - 1 for i in items], self._device)  # [len(items)]
        return computed.hidden[last_rows]


def complete_items(batch: list[Scheduled], num_decodes: int = 0) -> list[int]:
    """Return the indices of the items that need a sampled token: their sequences have no more tokens to compute."""
    others = batch[num_decodes:]
    ends = enumerate(zip(end_positions(others), others, strict=True), start=num_decodes)
    return [*range(num_decodes), *(i for i, (end, (seq, _)) in ends if end >= seq.num_tokens_with_placeholders)]


def sampling_rows(seqs: list[Sequence]) -> list[SamplingRow]:
    """Return the sampler's input for each row. A sequence with a draft has one more row for each draft token."""
    return [seq.sampling_row(num_ahead) for seq, rows in groupby(seqs) for num_ahead, _ in enumerate(rows)]


def sample_with_logprobs(
    logits: Tensor,
    seqs: list[Sequence],
    sample_rows: Callable[[Tensor, list[SamplingRow]], StepOutput] = sample,
) -> StepOutput:
    """Apply logits processors, then sample one token for each row of `logits` [len(seqs), vocab_size].

    All logprobs are computed from the raw logits. Rows that use neither processors nor logprobs cost nothing beyond
    sample_rows(). Raise FloatingPointError as sample() does, or ValueError if processors leave no token.
    """
    try:
        tokens = sample_rows(apply_logits_processors(logits, seqs), sampling_rows(seqs))
    except FloatingPointError:
        if not logits.float().logsumexp(dim=-1).isfinite().all():
            raise
        parameters = "allowed_token_ids, bad_words, min_tokens, logit_bias, structured_outputs"
        raise ValueError(f"no token is left to sample from after {parameters}") from None
    special = [(row, seq) for row, seq in enumerate(seqs) if not seq.is_plain]
    for row, seq in special:
        if seq.logits_processors:
            raw = logits[row].float()  # [vocab_size]
            tokens.logprobs[row] = (raw[tokens.token_ids[row]] - raw.logsumexp(dim=-1)).item()
    listed: dict[int, dict[int, Logprob]] = {}
    for count in {seq.params.logprobs for _, seq in special if seq.params.logprobs is not None}:
        rows = [row for row, seq in special if seq.params.logprobs == count]
        token_ids = [tokens.token_ids[row] for row in rows]
        likeliest = top_logprobs(logits[rows], token_ids, logits.shape[1] if count == -1 else count)
        listed |= zip(rows, likeliest, strict=True)
    for row, seq in special:
        if seq.params.logprob_token_ids:
            token_ids = [*seq.params.logprob_token_ids, tokens.token_ids[row]]
            listed[row] = named_logprobs(logits[row], token_ids)
    others = {row: SampledToken(tokens.token_ids[row], tokens.logprobs[row], each) for row, each in listed.items()}
    return tokens._replace(others=others)


def apply_logits_processors(logits: Tensor, seqs: list[Sequence]) -> Tensor:
    """Apply each row's logits processors to a copy of `logits` [num_seqs, vocab_size]. Without any, return `logits`."""
    if not any(seq.logits_processors for seq in seqs):
        return logits
    logits = logits.to(torch.float32, copy=True)
    for row, seq in zip(logits, seqs, strict=True):
        output_token_ids = seq.output_token_ids if seq.logits_processors else []
        for processor in seq.logits_processors:
            processor.apply(row, output_token_ids)
    return logits
