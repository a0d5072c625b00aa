"""A sequence with what SamplingParams of the product ask for, and an output for a stream's next moment."""

from dataclasses import replace
from typing import Any

from ..engine.sampling_params import SampledToken
from ..engine.sequence import Sequence as CoreSequence
from ..engine.sequence import request_output as core_request_output
from ..llama import StreamDecoder, Tokenizer
from .decoded_tokens import MAX_BEFORE, with_decoded_tokens
from .flat_logprobs import FlatLogprobs
from .logits_processors import LogitsProcessor
from ..backends.torch.logprobs import Logprob
from .output_text import OutputText
from .outputs import CompletionOutput, RequestOutput
from .params import RequestOutputKind, SamplingParams
from .repetition import has_repetition


class ToldToken(SampledToken):
    """A sampled token, and the likeliest in its place."""

    logprobs: dict[int, Logprob]

    @classmethod
    def of(cls, token: SampledToken, logprobs: dict[int, Logprob]) -> "ToldToken":
        told = cls(*token)
        told.logprobs = logprobs
        return told


class Sequence(CoreSequence):
    def __init__(
        self,
        params: SamplingParams,
        decoder: StreamDecoder | None,
        tokenizer: Tokenizer | None = None,
        eos_token_id: int | None = None,
        **fields: Any,
    ) -> None:
        """`tokenizer` gives the text of tokens that are told. An output ended by `eos_token_id` has no stop_reason."""
        super().__init__(params=params, decoder=decoder, **fields)
        self.params: SamplingParams
        self.logits_processors: list[LogitsProcessor] = []  # in order
        self.logprobs: Any = FlatLogprobs() if params.flat_logprobs else []  # of each token, if they are asked for
        self.prompt_logprobs: list[dict[int, Logprob]] = []  # of the prompt's tokens but the first, likewise
        self.num_cached_tokens: int | None = None  # of its beginning, found in the prefix cache when it was admitted
        self._text: OutputText = OutputText(decoder, params)
        self._tokenizer, self._eos_token_id = tokenizer, eos_token_id
        self._told: tuple[int, int, bool] = (0, 0, False)  # a stream's outputs had: tokens, characters, the end

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def awaits_prompt_logprobs(self) -> bool:
        """Whether tokens of the prompt lack theirs. The first sample tells the prompt, for all samples."""
        is_asked = self.params.prompt_logprobs is not None and self.sample_index == 0
        return is_asked and len(self.prompt_logprobs) < self.num_prompt_tokens - 1

    @property
    def may_hit(self) -> bool:
        """Whether it reads the prefix cache. What is computed can be told, what is cached cannot."""
        return not (self.params.skip_reading_prefix_cache or self.awaits_prompt_logprobs)

    @property
    def stop_reason(self) -> str | int | None:
        if self.finish_reason == "repetition":
            return "repetition_detected"
        if self.finish_reason != "stop":
            return None
        last = self.token_ids[-1]
        return self._text.stop_string or (None if last == self._eos_token_id else last)

    def note_admission(self) -> None:
        """It has got its blocks, and what is computed was cached. After a preemption nothing is noted any more."""
        if self.num_cached_tokens is None:
            self.num_cached_tokens = self.num_computed_tokens

    def append_token(self, token: SampledToken) -> None:
        if isinstance(token, ToldToken):
            self.logprobs.append(self._decoded(token.logprobs, self.num_tokens))
        if token.token_id in self.stop_token_ids and self.params.include_stop_str_in_output:
            self._text.push(token.token_id)  # core ends it without
        super().append_token(token)
        if self.params.repetition_detection and not self.finished and self._repeats():
            self.finish("repetition")

    def _repeats(self) -> bool:
        num_tokens = self.num_tokens - self.num_prompt_tokens
        asked = self.params.repetition_detection
        return num_tokens >= self.params.min_tokens and has_repetition(self.output_token_ids, asked)

    def tell_prompt(self, told: list[dict[int, Logprob]]) -> None:
        """Log-probabilities of the tokens of the prompt that come next."""
        for place in told:
            self.prompt_logprobs.append(self._decoded(place, 1 + len(self.prompt_logprobs)))

    def _decoded(self, place: dict[int, Logprob], position: int) -> dict[int, Logprob]:
        """With the text of each token that may be at `position`."""
        if self._tokenizer is None:
            return place
        return with_decoded_tokens(place, self.token_ids[max(0, position - MAX_BEFORE) : position], self._tokenizer)

    def completion(self) -> CompletionOutput:
        """All of the output so far; of a stream of deltas, what is new in it."""
        is_delta = self.params.output_kind is RequestOutputKind.DELTA
        num_tokens, num_characters, _ = self._told if is_delta else (0, 0, False)
        return CompletionOutput(
            index=self.sample_index,
            text=self._text.shown[num_characters:],
            token_ids=self.token_ids[self.num_prompt_tokens + num_tokens :],
            cumulative_logprob=self.cumulative_logprob,
            finish_reason=self.finish_reason,
            logprobs=None if self.params.num_logprobs is None else self.logprobs[num_tokens:],
            stop_reason=self.stop_reason,
        )

    def has_news(self, interval: int = 1) -> bool:
        """Whether a stream's next output has something of it: its first token, `interval` tokens, or its end."""
        num_told, _, is_ended = self._told
        num_tokens = self.num_tokens - self.num_prompt_tokens
        return self.finished > is_ended or num_tokens - num_told >= (interval if num_told else 1)

    @property
    def was_told(self) -> bool:
        return self._told != (0, 0, False)

    def note_told(self) -> None:
        """An output has all of it so far."""
        self._told = (self.num_tokens - self.num_prompt_tokens, len(self._text.shown), self.finished)


def is_due(samples: list[Sequence]) -> bool:
    """Whether a stream of the request with these samples has an output now."""
    params = samples[0].params
    if all(seq.finished for seq in samples):
        return True
    if params.output_kind is RequestOutputKind.FINAL_ONLY:
        return False
    return any(seq.has_news(params.stream_interval or 1) for seq in samples)


def request_output(samples: list[Sequence]) -> RequestOutput:
    """The output now of the request with these samples. One of deltas has the samples that have something new."""
    params, output = samples[0].params, core_request_output([*samples])
    completions, prompt_logprobs = output.outputs, prompt_logprobs_of(samples[0])
    if params.output_kind is RequestOutputKind.DELTA:
        completions = [each for seq, each in zip(samples, completions, strict=True) if seq.has_news()]
        if prompt_logprobs is not None and any(seq.was_told for seq in samples):
            prompt_logprobs = prompt_logprobs[:0]  # an earlier output had them
    for seq in samples:
        seq.note_told()
    num_cached_tokens = samples[0].num_cached_tokens or 0
    output = replace(output, outputs=completions)
    return RequestOutput.of(output, prompt_logprobs=prompt_logprobs, num_cached_tokens=num_cached_tokens)


def prompt_logprobs_of(seq: Sequence) -> Any:
    if seq.params.prompt_logprobs is None:
        return None
    places = [None, *seq.prompt_logprobs]  # nothing comes before the first token
    return FlatLogprobs(places) if seq.params.flat_logprobs else places
