"""What a call of LLM makes of the engine's outputs: of the refused ones, too."""

import copy
import warnings
from collections import abc
from contextlib import closing
from dataclasses import replace

from ..engine.outputs import RequestOutput as CoreRequestOutput
from ..engine.sampling_params import SamplingParams as CoreSamplingParams
from .outputs import RequestOutput
from .params import RequestOutputKind, SamplingParams
from .prompts import ParsedPrompt


def told(stream: abc.Generator[CoreRequestOutput, None, None]) -> abc.Generator[RequestOutput, None, None]:
    """Of a request that core has refused, an output like the others. Closing it closes the stream."""
    with closing(stream):
        for output in stream:
            yield RequestOutput.of(output)


def with_prompt(output: RequestOutput, prompt: ParsedPrompt) -> RequestOutput:
    """core, which has refused a text with its ids, knows no such form: the output gets both."""
    if not isinstance(prompt, dict) or output.prompt_token_ids:
        return output
    return replace(output, prompt=prompt.get("prompt"), prompt_token_ids=prompt["prompt_token_ids"])


def final_only(params: CoreSamplingParams) -> SamplingParams:
    """A copy that asks for the last output only."""
    params = copy.copy(SamplingParams.of(params))
    params.output_kind = RequestOutputKind.FINAL_ONLY
    return params


def warn_of_errors(outputs: abc.Sequence[RequestOutput], stacklevel: int) -> None:
    """An output that is empty because of an error looks like one that the model has ended at once.

    The warning names the line of the script: it is so many calls above this one.
    """
    failed = [output for output in outputs if output.error]
    if failed:
        first, count = failed[0], f"{len(failed)} of {len(outputs)} requests were not served"
        warnings.warn(f"{count}: request {first.request_id}: {first.error}", stacklevel=stacklevel)
