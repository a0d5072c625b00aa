"""Sequence: one request on its way: its tokens, its text so far, where its keys and values are."""

import time
from dataclasses import replace

from ..llama import StreamDecoder
from .outputs import CompletionOutput, RequestMetrics, RequestOutput
from .prefix_cache import BlockHash
from .sampling_params import SampledToken, SamplingParams, SamplingRow


class Sequence:
    """The token ids of a request, prompt and output, and how far they are computed.

        token_ids   | prompt ............ | output ...... | last sampled |
        in the pool | keys and values of num_computed_tokens | not yet   |

    A sampled token is appended at once; its keys and values are computed, and its slot written, in the next step.
    """

    def __init__(
        self,
        request_id: str,
        prompt: str | None,
        prompt_token_ids: list[int],
        params: SamplingParams,
        seed: int,
        stop_token_ids: frozenset[int],
        max_num_tokens: int,
        decoder: StreamDecoder | None,
        sample_index: int = 0,
    ) -> None:
        """`max_num_tokens` bounds prompt + output; without a `decoder` there is no text."""
        self.request_id = request_id
        self.prompt = prompt
        self.prompt_token_ids = prompt_token_ids
        self.token_ids = list(prompt_token_ids)
        self.params = params
        self.seed = seed
        self.sample_index = sample_index
        self.to_fork: list[Sequence] = []  # samples that wait for this one to compute their prompt
        self.stop_token_ids = stop_token_ids
        self.max_num_tokens = max_num_tokens
        self.num_computed_tokens = 0
        self.block_hashes: list[BlockHash] = []  # of its full blocks, as far as they were asked for
        self.block_table: list[int] = []  # token i is in block block_table[i // block_size]
        self.cumulative_logprob = 0.0
        self.finish_reason: str | None = None
        self.error: str | None = None
        self.metrics = RequestMetrics(arrival_time=time.perf_counter())
        self._text = OutputText(decoder, tuple(params.stop))

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_uncomputed_tokens(self) -> int:
        """1 while it decodes; more while tokens before its last one have no keys and values."""
        return self.num_tokens - self.num_computed_tokens

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    def sampling_row(self) -> SamplingRow:
        """What the sampler needs to draw this sequence's next token."""
        return SamplingRow(self.params, self.seed, self.sample_index, position=self.num_tokens)

    def append_token(self, token: SampledToken) -> None:
        """Take a sampled token; the sequence finishes if it is a stop token, ends a stop string, or was the last."""
        self.token_ids.append(token.token_id)
        self.cumulative_logprob += token.logprob
        if self.metrics.first_token_time is None:
            self.metrics = replace(self.metrics, first_token_time=time.perf_counter())
        if token.token_id in self.stop_token_ids:
            self.finish("stop")
        elif self._text.push(token.token_id):
            self.finish("stop")
        elif self.num_tokens >= self.max_num_tokens:
            self.finish("length")

    def finish(self, reason: str) -> None:
        """`reason` is what the output says as its finish_reason."""
        self.finish_reason = reason
        self._text.close()
        self.metrics = replace(self.metrics, finished_time=time.perf_counter())

    def fail(self, error: str) -> None:
        """It cannot go on, nor can the samples that it carries; what it has generated stays."""
        for seq in [self, *self.to_fork]:
            seq.error = error
            seq.finish("error")

    def completion(self) -> CompletionOutput:
        """All of the output so far."""
        return CompletionOutput(
            index=self.sample_index,
            text=self._text.shown,
            token_ids=self.token_ids[self.num_prompt_tokens :],
            cumulative_logprob=self.cumulative_logprob,
            finish_reason=self.finish_reason,
        )


def request_output(samples: list[Sequence]) -> RequestOutput:
    """The output so far of the request with these samples. It has finished when all of them have."""
    seq, finished = samples[0], all(seq.finished for seq in samples)
    first_token_times = [seq.metrics.first_token_time for seq in samples if seq.metrics.first_token_time]
    return RequestOutput(
        request_id=seq.request_id,
        prompt=seq.prompt,
        prompt_token_ids=seq.prompt_token_ids,
        outputs=[seq.completion() for seq in samples],
        finished=finished,
        metrics=RequestMetrics(
            arrival_time=seq.metrics.arrival_time,
            first_token_time=min(first_token_times, default=None),
            finished_time=max(seq.metrics.finished_time for seq in samples) if finished else None,
        ),
        error=next((seq.error for seq in samples if seq.error), None),
    )


class OutputText:
    """The text of an output as it grows, cut at the first stop string.

    A stop string may straddle tokens, and text once shown is never taken back: so an ending that may yet become a stop
    string is held back.
    """

    def __init__(self, decoder: StreamDecoder | None, stop: tuple[str, ...]) -> None:
        self._decoder = decoder
        self._stop = stop
        self._held_back = ""
        self.shown = ""

    def push(self, token_id: int) -> bool:
        """Add the text of a token. True if a stop string ended the text; the text then ends before it."""
        return self._add(self._decoder.push(token_id)) if self._decoder else False

    def close(self) -> None:
        """No more tokens come: show what was held back."""
        if self._decoder:
            self._add(self._decoder.flush())
        self.shown, self._held_back, self._decoder = self.shown + self._held_back, "", None

    def _add(self, piece: str) -> bool:
        text = self._held_back + piece
        found = [(text.find(stop) + len(stop), text.find(stop)) for stop in self._stop if stop in text]
        if found:
            _, start = min(found)  # the first to be complete, as if the characters came one by one
            self.shown, self._held_back, self._decoder = self.shown + text[:start], "", None
            return True
        keep = len(text) - longest_beginning(text, self._stop)
        self.shown, self._held_back = self.shown + text[:keep], text[keep:]
        return False


def longest_beginning(text: str, stops: tuple[str, ...]) -> int:
    r"""Length of the longest end of `text` that begins a stop string.

    >>> longest_beginning("and then The", ("The End", "\n\n"))
    3
    """
    lengths = (n for stop in stops for n in range(1, len(stop)) if text.endswith(stop[:n]))
    return max(lengths, default=0)
