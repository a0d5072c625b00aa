"""A sequence keeps what was told of its tokens."""

from typing import Any

from ..core.sampling import SampledToken
from ..core.sequence import Sequence as CoreSequence
from .logprobs import Logprob
from .outputs import CompletionOutput
from .params import SamplingParams


class ToldToken(SampledToken):
    """A sampled token, and the likeliest in its place."""

    logprobs: dict[int, Logprob]

    @classmethod
    def of(cls, token: SampledToken, logprobs: dict[int, Logprob]) -> "ToldToken":
        told = cls(*token)
        told.logprobs = logprobs
        return told


class Sequence(CoreSequence):
    def __init__(self, **fields: Any) -> None:
        super().__init__(**(fields | {"params": SamplingParams.of(fields["params"])}))
        self.params: SamplingParams
        self.logprobs: list[dict[int, Logprob]] = []  # of each token of the output, if they are asked for
        self.prompt_logprobs: list[dict[int, Logprob]] = []  # of the prompt's tokens but the first, likewise
        self.num_cached_tokens: int | None = None  # of its beginning, found in the prefix cache when it was admitted

    @property
    def awaits_prompt_logprobs(self) -> bool:
        """Whether tokens of the prompt lack theirs. The first sample tells the prompt, for all samples."""
        is_asked = self.params.prompt_logprobs is not None and self.sample_index == 0
        return is_asked and len(self.prompt_logprobs) < self.num_prompt_tokens - 1

    def note_admission(self) -> None:
        """It has got its blocks, and what is computed was cached. After a preemption nothing is noted any more."""
        if self.num_cached_tokens is None:
            self.num_cached_tokens = self.num_computed_tokens

    def append_token(self, token: SampledToken) -> None:
        if isinstance(token, ToldToken):
            self.logprobs.append(token.logprobs)
        super().append_token(token)

    def completion(self) -> CompletionOutput:
        logprobs = None if self.params.logprobs is None else list(self.logprobs)
        return CompletionOutput(**vars(super().completion()), logprobs=logprobs)
