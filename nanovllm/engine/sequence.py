"""Sequence: the state of one sample of a request, with its tokens, its text so far and its blocks in the pool."""

import time
from dataclasses import dataclass, field
from functools import cached_property

from ..checkpoints.stream_decoder import MAX_BEFORE, StreamDecoder
from ..checkpoints.tokenizer import HFTokenizer
from ..requests.logits_processors import LogitsProcessor
from ..requests.outputs import CompletionOutput, Position, RequestMetrics, RequestOutput, with_decoded_tokens
from ..requests.pooling_params import PoolingParams
from ..requests.sampling_params import RequestOutputKind, SamplingParams
from ..requests.speculation import NgramDrafter
from ..requests.tokens import SampledToken, SamplingRow
from .output_text import OutputText, RepetitionDetector
from .prefix_cache import BlockHash


@dataclass(eq=False)
class Sequence:
    """The tokens of one sample, prompt and output, and how many of them are computed.

        token_ids   | prompt ............ | output ...... | last sampled |
        in the pool | keys and values of num_computed_tokens | not yet   |

    A sampled token is appended immediately. The next step computes its key and value, and writes them to its slot.

    To launch a step is to start it, and to read it is to wait for its sampled tokens. In between, it is in flight. With
    async_scheduling, a step is scheduled while the previous one is in flight. The tokens that the previous step
    computes are in flight, too, and the token that it samples has a placeholder, which is not in token_ids:

        token_ids   | prompt ............ | output ............... | placeholder |
                    | num_computed_tokens | num_in_flight_tokens   | the next step starts here
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    params: SamplingParams
    seed: int
    stop_token_ids: set[int]
    max_num_tokens: int  # prompt + output
    tokenizer: HFTokenizer | None = None  # without one there is no text
    sample_index: int = 0  # among the samples of one prompt
    logprobs_tokenizer: HFTokenizer | None = None  # for the tokens in logprobs, including special ones
    eos_token_id: int | None = None  # a stop at this token leaves stop_reason None
    pooling_params: PoolingParams | None = None  # if set, the result is an embedding, not text
    root_hash: BlockHash = b""  # the parent hash of its first block, made from cache_salt
    num_computed_tokens: int = field(default=0, init=False)
    num_in_flight_tokens: int = field(default=0, init=False)  # computed by steps that have not been read
    num_output_placeholders: int = field(default=0, init=False)  # for the tokens that these steps sample
    # Stands for the unread token in input_ids(): the token if the executor knows it, or ~row, which the device replaces
    placeholder_id: int = field(default=0, init=False)
    num_cached_tokens: int = field(default=0, init=False)  # prompt tokens found in the cache, before any output
    num_declined_blocks: int = field(default=0, init=False)  # in a tier, but faster to compute than to load
    num_preemptions: int = field(default=0, init=False)
    # Up to this many tokens, a plain sequence has slots of its own, so the scheduler need not look at it. 0 if it must
    ready_until: int = field(default=0, init=False)
    block_table: list[int] = field(default_factory=list, init=False)  # token i is in block block_table[i // block_size]
    block_hashes: list[BlockHash] = field(default_factory=list, init=False)  # of its full blocks, made when needed
    to_fork: list["Sequence"] = field(default_factory=list, init=False)  # samples to fork once its prompt is computed
    logits_processors: list[LogitsProcessor] = field(default_factory=list, init=False)
    drafter: NgramDrafter | None = field(default=None, init=False)  # if the request may speculate
    draft_token_ids: list[int] = field(default_factory=list, init=False)  # guesses of this step, not part of token_ids
    cumulative_logprob: float = field(default=0.0, init=False)
    logprobs: list[Position] = field(default_factory=list, init=False)
    prompt_logprobs: list[Position] = field(default_factory=list, init=False)  # from the second token on
    embedding: list[float] | None = field(default=None, init=False)  # with pooling_params
    finish_reason: str | None = field(default=None, init=False)
    error: str | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.token_ids = list(self.prompt_token_ids)
        decoder = StreamDecoder(self.tokenizer, self.prompt_token_ids) if self.tokenizer else None
        self.metrics = RequestMetrics(arrival_time=time.perf_counter())
        params = self.params
        self._text = OutputText(decoder, tuple(params.stop or ()), params.include_stop_str_in_output, params.min_tokens)
        detection = params.repetition_detection
        self._repetitions = RepetitionDetector(detection) if detection and detection.max_pattern_size else None
        self._num_read_tokens = len(self.token_ids)  # those whose text is in _text, or is not shown
        self._num_reported_tokens = self._num_reported_pieces = 0  # in the last output
        self._has_reported_end = False

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - len(self.prompt_token_ids)

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def num_tokens_with_placeholders(self) -> int:
        return len(self.token_ids) + self.num_output_placeholders

    @property
    def num_launched_tokens(self) -> int:
        """The tokens that are computed or in flight: the position where the next step starts."""
        return self.num_computed_tokens + self.num_in_flight_tokens

    @property
    def num_uncomputed_tokens(self) -> int:
        """The tokens left to launch: the whole prompt at first (prefill), then 1 (decode)."""
        num_launched_tokens = self.num_computed_tokens + self.num_in_flight_tokens  # written out: this runs often
        return len(self.token_ids) + self.num_output_placeholders - num_launched_tokens

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def ends_in_flight(self) -> bool:
        """True if the token in flight is the last one that max_num_tokens allows."""
        return self.num_output_placeholders > 0 and self.num_tokens_with_placeholders >= self.max_num_tokens

    @cached_property
    def is_plain(self) -> bool:
        """True if its tokens only have to be appended: nothing else is computed, checked or kept for them."""
        has_more = self.must_read_first or self.params.prompt_logprobs is not None
        return not (has_more or self.params.stop or self._repetitions)

    @cached_property
    def is_streamed(self) -> bool:
        """True if outputs may include it before its request has finished."""
        return self.params.output_kind is not RequestOutputKind.FINAL_ONLY

    @cached_property
    def is_delta_stream(self) -> bool:
        """True if each new token is an output of its own, with its text alone: see next_delta()."""
        params = self.params
        has_logprobs = params.num_logprobs is not None or params.prompt_logprobs is not None
        is_each = params.output_kind is RequestOutputKind.DELTA and (params.stream_interval or 1) == 1
        return is_each and params.n == 1 and not has_logprobs

    @property
    def must_read_first(self) -> bool:
        """True if the host must read each step before it launches the next one."""
        params = self.params
        has_logprobs = params.logprobs is not None or bool(params.logprob_token_ids) or self.awaits_prompt_logprobs
        is_special = self.pooling_params is not None or self.drafter is not None
        return has_logprobs or is_special or bool(self.logits_processors)

    @property
    def awaits_prompt_logprobs(self) -> bool:
        """True while logprobs of the prompt are missing. The first sample collects them for the whole request."""
        is_first = self.params.prompt_logprobs is not None and self.sample_index == 0
        return is_first and len(self.prompt_logprobs) < self.num_prompt_tokens - 1

    @property
    def may_hit(self) -> bool:
        """True if cached blocks may be used. Logprobs of the prompt require computing it."""
        return not (self.params.skip_reading_prefix_cache or self.awaits_prompt_logprobs)

    @property
    def stop_reason(self) -> str | int | None:
        """The stop string or token that ended the output, or "repetition_detected". None otherwise, and for EOS."""
        if self.finish_reason == "repetition":
            return "repetition_detected"
        if self.finish_reason != "stop" or self.embedding is not None:
            return None
        last = self.token_ids[-1]
        return self._text.stop_string or (None if last == self.eos_token_id else last)

    def sampling_row(self, num_ahead: int = 0) -> SamplingRow:
        """Return what the sampler needs to draw the next token, or the one after `num_ahead` tokens of the draft."""
        position = self.num_tokens_with_placeholders + num_ahead
        return SamplingRow(self.params, self.seed, self.sample_index, position)

    def input_ids(self, num_tokens: int, start: int | None = None) -> list[int]:
        """Return the next `num_tokens` tokens to compute, or those from position `start` on.

        The draft follows the last token. If the newest token has not been read, placeholder_id stands for it.
        """
        start = self.num_launched_tokens if start is None else start
        token_ids = self.token_ids[start : start + num_tokens]
        if len(token_ids) < num_tokens:
            after, first = self.draft_token_ids or [self.placeholder_id], max(start - self.num_tokens, 0)
            token_ids += after[first : first + num_tokens - len(token_ids)]
        return token_ids

    def input_id(self, position: int) -> int:
        """Return the token at a position, as input_ids() does."""
        after = position - len(self.token_ids)
        return self.token_ids[position] if after < 0 else (self.draft_token_ids or [self.placeholder_id])[after]

    def note_launched(self, num_tokens: int) -> None:
        """Count the tokens of a launched step as in flight, and add a placeholder if the step samples."""
        self.num_output_placeholders += self.num_uncomputed_tokens == num_tokens  # if it computes the last tokens
        self.num_in_flight_tokens += num_tokens

    def note_read(self, num_tokens: int, has_token: bool, num_accepted: int = 0) -> None:
        """Count a step's tokens and its accepted draft tokens as computed, once the sampled token is appended."""
        self.num_in_flight_tokens -= num_tokens
        self.num_computed_tokens += num_tokens + num_accepted
        self.num_output_placeholders -= has_token

    def forget_launched(self) -> None:
        """Count no token as in flight, and drop the draft: the steps failed, or the sequence has lost its blocks."""
        self.num_in_flight_tokens = self.num_output_placeholders = self.ready_until = 0
        self.draft_token_ids = []

    def advance(self, token_id: int, logprob: float) -> None:
        """Append the token of a decode, and count the decode as read.

        This is append_token() and note_read() in one, for a plain sequence that goes on.
        """
        self.token_ids.append(token_id)
        self.cumulative_logprob += logprob
        self.num_in_flight_tokens -= 1
        self.num_output_placeholders -= 1
        self.num_computed_tokens += 1

    def append_tokens(self, tokens: list[SampledToken]) -> int:
        """Append the first token, and each later one as long as the token before it matches the draft.

        Clear the draft. Return how many of its tokens were accepted: their keys and values are valid.
        """
        draft, self.draft_token_ids = self.draft_token_ids, []
        for num_accepted, token in enumerate(tokens):
            self.append_token(token)
            if self.finished or draft[num_accepted : num_accepted + 1] != [token.token_id]:
                return num_accepted
        raise AssertionError("the last row has no draft after it, so the loop has returned")

    def append_token(self, token: SampledToken) -> None:
        """Append a sampled token. Finish at a stop token, a stop string, the maximum length or a repetition."""
        if token.logprobs is not None:
            self.logprobs.append(self._decoded(token.logprobs, self.num_tokens))
        is_stop_token = token.token_id in self.stop_token_ids
        is_hidden = is_stop_token and not self.params.include_stop_str_in_output
        if is_hidden:
            self._read_text()
        self.token_ids.append(token.token_id)
        self.cumulative_logprob += token.logprob
        if self.metrics.first_token_time is None:
            self.metrics = RequestMetrics(self.metrics.arrival_time, time.perf_counter())
        repeats = self._repetitions is not None and self._repetitions.push(token.token_id)
        self._num_read_tokens += is_hidden
        ends_stop_string = bool(self.params.stop) and self._read_text()
        if is_stop_token or ends_stop_string:
            self.finish("stop")
        elif len(self.token_ids) >= self.max_num_tokens:
            self.finish("length")
        elif repeats and self.num_output_tokens >= self.params.min_tokens:
            self.finish("repetition")

    def add_embedding(self, embedding: list[float]) -> None:
        """Store the embedding of the prompt, and finish: nothing is sampled."""
        self.embedding = embedding
        self.metrics = RequestMetrics(self.metrics.arrival_time, time.perf_counter())
        self.finish("stop")

    def add_prompt_logprobs(self, logprobs: list[Position]) -> None:
        """Append the logprobs of the next tokens of the prompt."""
        for each in logprobs:
            self.prompt_logprobs.append(self._decoded(each, 1 + len(self.prompt_logprobs)))

    def finish(self, reason: str, error: str | None = None) -> None:
        """End the sequence. No tokens will follow."""
        self.finish_reason, self.error = reason, error
        self._read_text()
        self._text.close()
        self.metrics = RequestMetrics(self.metrics.arrival_time, self.metrics.first_token_time, time.perf_counter())

    def completion(self) -> CompletionOutput:
        """Return the output so far, or only what is new since the last output if the request streams deltas."""
        is_delta = self.params.output_kind is RequestOutputKind.DELTA
        start, num_pieces = (self._num_reported_tokens, self._num_reported_pieces) if is_delta else (0, 0)
        self._read_text()
        return CompletionOutput(
            index=self.sample_index,
            text="".join(self._text.pieces[num_pieces:]),
            token_ids=self.token_ids[len(self.prompt_token_ids) + start :],
            cumulative_logprob=self.cumulative_logprob,
            finish_reason=self.finish_reason,
            logprobs=None if self.params.num_logprobs is None else self.logprobs[start:],
            stop_reason=self.stop_reason,
        )

    def next_delta(self) -> RequestOutput:
        """Return what request_output() does, for a sequence with is_delta_stream that goes on."""
        start = len(self.prompt_token_ids) + self._num_reported_tokens
        token_ids, pieces, first = self.token_ids[start:], self._text.pieces, self._num_reported_pieces
        if token_ids and start == self._num_read_tokens:  # with stop strings, each was read when it came
            self._num_read_tokens += len(token_ids)
            self._text.push(token_ids)
        text = pieces[first] if len(pieces) == first + 1 else "".join(pieces[first:])
        new = CompletionOutput(0, text, token_ids, self.cumulative_logprob)
        self._num_reported_tokens, self._num_reported_pieces = self._num_reported_tokens + len(token_ids), len(pieces)
        return RequestOutput(
            self.request_id, self.prompt, self.prompt_token_ids, [new], False, self.metrics,
            num_cached_tokens=self.num_cached_tokens,
        )  # fmt: skip

    def has_news(self, interval: int = 1) -> bool:
        """Return True if an output is due: for the first token, after `interval` more tokens, or at the end."""
        num_new = len(self.token_ids) - len(self.prompt_token_ids) - self._num_reported_tokens
        has_end = self.finished and not self._has_reported_end
        return has_end or num_new >= (interval if self._num_reported_tokens else 1)

    @property
    def was_reported(self) -> bool:
        """True if an earlier output has included this sample."""
        return self._num_reported_tokens > 0 or self._has_reported_end

    def note_reported(self) -> None:
        """Remember that an output has included everything so far."""
        self._num_reported_tokens = len(self.token_ids) - len(self.prompt_token_ids)
        self._num_reported_pieces = len(self._text.pieces)
        self._has_reported_end = self.finished

    def _read_text(self) -> bool:
        """Add the text of all tokens since the last call. Return True if they complete a stop string."""
        new_ids, self._num_read_tokens = self.token_ids[self._num_read_tokens :], len(self.token_ids)
        return bool(new_ids) and self._text.push(new_ids)

    def _decoded(self, logprobs: Position, index: int) -> Position:
        """Return `logprobs` with the text of each token, decoded as if it were token `index`."""
        if self.logprobs_tokenizer is None:
            return logprobs
        before = self.token_ids[max(0, index - MAX_BEFORE) : index]
        return with_decoded_tokens(logprobs, before, self.logprobs_tokenizer)


def is_due(samples: list[Sequence]) -> bool:
    """Return True if the request with these samples should return an output now."""
    params = samples[0].params
    if len(samples) == 1:  # the usual case
        seq = samples[0]
        return seq.finished or (seq.is_streamed and seq.has_news(params.stream_interval or 1))
    if all(seq.finished for seq in samples):
        return True
    if params.output_kind is RequestOutputKind.FINAL_ONLY:
        return False
    return any(seq.has_news(params.stream_interval or 1) for seq in samples)


def request_output(samples: list[Sequence]) -> RequestOutput:
    """Return the output so far of the request with these samples. It says whether all of them have finished.

    A delta includes only the samples with news, and the prompt's logprobs only the first time.
    """
    seq, is_single = samples[0], len(samples) == 1  # the usual case
    finished = seq.finished if is_single else all(seq.finished for seq in samples)
    is_delta = seq.params.output_kind is RequestOutputKind.DELTA
    prompt_logprobs: list[Position | None] | None = None
    if seq.params.prompt_logprobs is not None:
        was_reported = is_delta and any(seq.was_reported for seq in samples)
        prompt_logprobs = [] if was_reported else [None, *seq.prompt_logprobs]  # None for the first token
    output = RequestOutput(
        request_id=seq.request_id,
        prompt=seq.prompt,
        prompt_token_ids=seq.prompt_token_ids,
        outputs=[seq.completion() for seq in samples if is_single or not is_delta or seq.has_news()],
        finished=finished,
        metrics=seq.metrics if is_single else request_metrics(samples, finished),
        error=seq.error if is_single else next((seq.error for seq in samples if seq.error), None),
        prompt_logprobs=prompt_logprobs,
        num_cached_tokens=seq.num_cached_tokens,
        embedding=seq.embedding,
    )
    for seq in samples:
        seq.note_reported()
    return output


def request_metrics(samples: list[Sequence], finished: bool) -> RequestMetrics:
    """Return when the request arrived, when a sample first had a token and, if `finished`, when all had ended."""
    first_token_times = [seq.metrics.first_token_time for seq in samples if seq.metrics.first_token_time]
    finished_times = [seq.metrics.finished_time for seq in samples if seq.metrics.finished_time]
    return RequestMetrics(
        arrival_time=samples[0].metrics.arrival_time,
        first_token_time=min(first_token_times, default=None),
        finished_time=max(finished_times) if finished else None,
    )
