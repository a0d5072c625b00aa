"""Sequence: the state of one sample of a request, with its tokens, its text so far and its blocks in the pool."""

import time
from dataclasses import dataclass, field

from .llama import StreamDecoder, Tokenizer
from .outputs import CompletionOutput, RequestMetrics, RequestOutput
from .prefix_cache import BlockHash
from .sampling import SampledToken, SamplingParams, SamplingRow


@dataclass(eq=False)
class Sequence:
    """The tokens of a request, prompt and output, and how many of them are computed.

        token_ids   | prompt ............ | output ...... | last sampled |
        in the pool | keys and values of num_computed_tokens | not yet   |

    A sampled token is appended immediately. The next step computes its key and value, and writes them to its slot.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    params: SamplingParams
    seed: int
    stop_token_ids: set[int]
    max_num_tokens: int  # prompt + output
    tokenizer: Tokenizer | None = None  # without one there is no text
    sample_index: int = 0  # among the samples of one prompt
    num_computed_tokens: int = field(default=0, init=False)
    block_table: list[int] = field(default_factory=list, init=False)  # token i is in block block_table[i // block_size]
    block_hashes: list[BlockHash] = field(default_factory=list, init=False)  # of its full blocks, made when needed
    to_fork: list["Sequence"] = field(default_factory=list, init=False)  # samples to fork once its prompt is computed
    draft_token_ids: list[int] = field(default_factory=list, init=False)  # guesses of this step, not part of token_ids
    text: str = field(default="", init=False)
    cumulative_logprob: float = field(default=0.0, init=False)
    finish_reason: str | None = field(default=None, init=False)
    error: str | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.token_ids = list(self.prompt_token_ids)
        self.decoder = StreamDecoder(self.tokenizer, self.prompt_token_ids) if self.tokenizer else None
        self.metrics = RequestMetrics(arrival_time=time.perf_counter())

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_uncomputed_tokens(self) -> int:
        """The whole prompt at first (prefill), then 1 (decode)."""
        return self.num_tokens - self.num_computed_tokens

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    def sampling_row(self, num_ahead: int = 0) -> SamplingRow:
        """Return what the sampler needs to draw the next token, or the one after `num_ahead` tokens of the draft."""
        return SamplingRow(self.params, self.seed, self.sample_index, position=self.num_tokens + num_ahead)

    def next_token_ids(self, num_tokens: int) -> list[int]:
        """Return the next tokens to compute. The draft follows the last token."""
        return (self.token_ids[self.num_computed_tokens :] + self.draft_token_ids)[:num_tokens]

    def append_tokens(self, tokens: list[SampledToken]) -> int:
        """Append the first token, if there is one, and each later one while the token before it matches the draft.

        Clear the draft. Return how many of its tokens were accepted: their keys and values are valid.
        """
        draft, self.draft_token_ids = self.draft_token_ids, []
        for num_accepted, token in enumerate(tokens):
            self.append_token(token)
            if self.finished or draft[num_accepted : num_accepted + 1] != [token.token_id]:
                return num_accepted
        return 0  # there were no tokens: more of the prompt is to be computed

    def append_token(self, token: SampledToken) -> None:
        """Append a sampled token. Finish at a stop token, at a stop string, or at the maximum length.

        If it is the last one for two reasons, the reason to give is "stop". The text of a stop token is not shown. Add
        each logprob to cumulative_logprob, and note when the first token came.
        """
        self.token_ids.append(token.token_id)
        self.cumulative_logprob += token.logprob
        self.metrics.first_token_time = self.metrics.first_token_time or time.perf_counter()
        if token.token_id in self.stop_token_ids:
            self.finish("stop")
            return
        if self.decoder:
            self.text += self.decoder.push(token.token_id)
        if self._cut_at_stop_string():
            self.finish("stop")
        elif self.num_tokens >= self.max_num_tokens:
            self.finish("length")

    def finish(self, reason: str, error: str | None = None) -> None:
        """End the sequence: no more tokens come."""
        if self.decoder:
            self.text += self.decoder.flush()
        self.finish_reason, self.error = reason, error
        self.metrics.finished_time = time.perf_counter()

    def _cut_at_stop_string(self) -> bool:
        """Cut the text before a stop string, and return True, if it contains one.

        The string that is complete first ends the text; of two that are complete together, the longer one.
        """
        starts = [(self.text.index(stop), stop) for stop in self.params.stop if stop in self.text]
        if starts:
            start, _ = min(starts, key=lambda match: (match[0] + len(match[1]), match[0]))  # the first that is complete
            self.text, self.decoder = self.text[:start], None
        return bool(starts)

    def completion(self) -> CompletionOutput:
        """Return the output so far. While it runs, hold back an ending that may become a stop string.

        A stop string may straddle tokens, and text that a caller has seen is never taken back.
        """
        num_held_back = 0 if self.finished else max((len(stop) - 1 for stop in self.params.stop), default=0)
        text = self.text[: max(0, len(self.text) - num_held_back)]
        token_ids = self.token_ids[self.num_prompt_tokens :]
        return CompletionOutput(self.sample_index, text, token_ids, self.cumulative_logprob, self.finish_reason)


def request_output(samples: list[Sequence]) -> RequestOutput:
    """Return the output so far of the request with these samples. It says whether all of them have finished."""
    first, finished = samples[0], all(seq.finished for seq in samples)
    first_token_times = [seq.metrics.first_token_time for seq in samples if seq.metrics.first_token_time]
    metrics = RequestMetrics(first.metrics.arrival_time, min(first_token_times, default=None))
    if finished:
        metrics.finished_time = max(seq.metrics.finished_time for seq in samples)
    outputs, error = [seq.completion() for seq in samples], next((seq.error for seq in samples if seq.error), None)
    return RequestOutput(first.request_id, first.prompt, first.prompt_token_ids, outputs, finished, metrics, error)
