"""Outputs with vLLM's fields. Those of core are made into them."""

from dataclasses import dataclass
from typing import Any

from ..engine.outputs import CompletionOutput as CoreCompletionOutput
from ..engine.outputs import RequestOutput as CoreRequestOutput
from ..backends.torch.logprobs import Logprob


@dataclass(frozen=True)
class CompletionOutput(CoreCompletionOutput):
    """finish_reason may be "repetition" too: repetition_detection ended it. logprobs may be FlatLogprobs."""

    logprobs: list[dict[int, Logprob]] | None = None  # of each token the likeliest in its place, and its own
    stop_reason: str | int | None = None  # the stop string or the stop token that ended it; None for the EOS token
    lora_request: None = None

    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(frozen=True)
class RequestOutput(CoreRequestOutput):
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None  # like the outputs'; None for the first token
    num_cached_tokens: int = 0  # of the prompt, that were computed before
    lora_request: None = None

    @classmethod
    def of(cls, output: CoreRequestOutput, **more: Any) -> "RequestOutput":
        """The same output with `more` fields. A request that core refused, and a beam, have no log-probabilities."""
        if isinstance(output, cls):
            return output
        completions = [
            each if isinstance(each, CompletionOutput) else CompletionOutput(**vars(each)) for each in output.outputs
        ]
        return cls(**(vars(output) | {"outputs": completions} | more))

    @classmethod
    def failed(cls, request_id: str, prompt: str | list[int], error: str) -> "RequestOutput":
        return cls.of(CoreRequestOutput.failed(request_id, prompt, error))
