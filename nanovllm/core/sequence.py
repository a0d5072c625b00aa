"""Sequence: one sample of a request on its way: its tokens, its text so far, where its keys and values are."""

import time
from dataclasses import replace

from .llama import StreamDecoder
from .outputs import CompletionOutput, RequestMetrics, RequestOutput
from .prefix_cache import CachedBlock, Hash
from .sampling import Logprob, SampledToken, SamplingParams, SamplingRow


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
        self.sample_index = sample_index
        self.prompt = prompt
        self.num_prompt_tokens = len(prompt_token_ids)
        self.token_ids = list(prompt_token_ids)
        self.params = params
        self.seed = seed
        self.stop_token_ids = stop_token_ids
        self.max_num_tokens = max_num_tokens
        self.num_computed_tokens = 0
        self.block_table: list[int] = []  # token i is in block block_table[i // block_size]
        self.host_table: list[int] = []  # the same on the host, while it is swapped out
        self.block_hashes: list[Hash] = []  # of its full blocks, as far as they were asked for
        self.prefix: list[CachedBlock] = []  # the texts of its blocks that are full and computed
        self.followers: list[Sequence] = []  # they hold no blocks yet, and will be forked from this one
        self.cumulative_logprob = 0.0
        self.logprobs: list[dict[int, Logprob]] = []  # of each token of the output, if params.logprobs asks for them
        self.prompt_logprobs: list[dict[int, Logprob]] = []  # of the prompt's tokens but the first, likewise
        self.num_cached_tokens: int | None = None  # of its beginning, found in the prefix cache on its first admission
        self.finish_reason: str | None = None
        self.error: str | None = None
        self.metrics = RequestMetrics(arrival_time=time.perf_counter())
        self._text = OutputText(decoder, tuple(params.stop))

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_uncomputed_tokens(self) -> int:
        """1 while it decodes; more if part of its prompt is to come, or if it was preempted."""
        return self.num_tokens - self.num_computed_tokens

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def awaits_prompt_logprobs(self) -> bool:
        """Whether tokens of its prompt lack theirs. It may hit nothing then: only what is computed gets them."""
        is_asked = self.params.prompt_logprobs is not None and self.sample_index == 0
        return is_asked and len(self.prompt_logprobs) < self.num_prompt_tokens - 1

    def samplers(self) -> list["Sequence"]:
        """Those whose next token comes from the logits of this one's last: itself, and followers of the same tokens."""
        return [self, *(seq for seq in self.followers if seq.token_ids == self.token_ids)]

    def sampling_row(self) -> SamplingRow:
        """What the sampler needs to draw this sequence's next token."""
        return SamplingRow(self.params, self.seed, self.sample_index, position=self.num_tokens)

    def append_token(self, token: SampledToken) -> None:
        """Take a sampled token; the sequence finishes if it is a stop token, ends a stop string, or was the last."""
        self.token_ids.append(token.token_id)
        self.cumulative_logprob += token.logprob
        if token.logprobs is not None:
            self.logprobs.append(token.logprobs)
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
        """It cannot go on; what it has generated stays."""
        self.error = error
        self.finish("error")

    def completion(self) -> CompletionOutput:
        """All of the output so far."""
        return CompletionOutput(
            index=self.sample_index,
            text=self._text.shown,
            token_ids=self.token_ids[self.num_prompt_tokens :],
            cumulative_logprob=self.cumulative_logprob,
            finish_reason=self.finish_reason,
            logprobs=None if self.params.logprobs is None else list(self.logprobs),
        )


def request_output(group: list[Sequence]) -> RequestOutput:
    """The output so far of a request, of which these are the samples. It has finished when all of them have."""
    first, finished = group[0], all(seq.finished for seq in group)
    return RequestOutput(
        request_id=first.request_id,
        prompt=first.prompt,
        prompt_token_ids=first.token_ids[: first.num_prompt_tokens],
        outputs=[seq.completion() for seq in group],
        finished=finished,
        metrics=RequestMetrics(
            arrival_time=first.metrics.arrival_time,
            first_token_time=first.metrics.first_token_time,
            finished_time=max(seq.metrics.finished_time for seq in group) if finished else None,
        ),
        error=next((seq.error for seq in group if seq.error), None),
        prompt_logprobs=None if first.params.prompt_logprobs is None else [None, *first.prompt_logprobs],
        num_cached_tokens=first.num_cached_tokens or 0,
    )


def shared_prefix(leader: Sequence, follower: Sequence) -> int:
    """Of how many tokens a follower takes over the keys and values from its leader.

    If all their tokens are the same, of all: its next token is sampled from the leader's last. Else of those that both
    begin with, but never of its own last, which it must compute.
    """
    if follower.token_ids == leader.token_ids:
        return follower.num_tokens
    pairs = enumerate(zip(leader.token_ids, follower.token_ids, strict=False))
    shortest = min(leader.num_tokens, follower.num_tokens)
    return min(next((i for i, (a, b) in pairs if a != b), shortest), follower.num_tokens - 1)


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
