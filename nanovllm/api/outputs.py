"""Outputs that hold log-probabilities. Those of core are made into them."""

from dataclasses import dataclass

from ..core.outputs import CompletionOutput as CoreCompletionOutput
from ..core.outputs import RequestOutput as CoreRequestOutput
from .logprobs import Logprob


@dataclass(frozen=True)
class CompletionOutput(CoreCompletionOutput):
    logprobs: list[dict[int, Logprob]] | None = None  # of each token the likeliest in its place, and its own


@dataclass(frozen=True)
class RequestOutput(CoreRequestOutput):
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None  # as CompletionOutput.logprobs; None for the first
    num_cached_tokens: int = 0  # of the prompt, that were computed before

    @classmethod
    def of(
        cls,
        output: CoreRequestOutput,
        prompt_logprobs: list[dict[int, Logprob] | None] | None = None,
        num_cached_tokens: int = 0,
    ) -> "RequestOutput":
        """The same output. A request that core refused, and a beam, have no log-probabilities."""
        if isinstance(output, cls):
            return output
        completions = [
            each if isinstance(each, CompletionOutput) else CompletionOutput(**vars(each)) for each in output.outputs
        ]
        told = {"prompt_logprobs": prompt_logprobs, "num_cached_tokens": num_cached_tokens}
        return cls(**(vars(output) | {"outputs": completions} | told))

    @classmethod
    def failed(cls, request_id: str, prompt: str | list[int], error: str) -> "RequestOutput":
        return cls.of(CoreRequestOutput.failed(request_id, prompt, error))
