"""LLM, with an engine that tells log-probabilities."""

import copy
from collections import abc
from contextlib import closing
from typing import cast

from ..core.beam_search import BeamSearchParams
from ..core.config import EngineConfig
from ..core.llm import LLM as CoreLLM
from ..core.llm import Params, Prompts
from ..core.outputs import RequestOutput as CoreRequestOutput
from ..core.sampling import SamplingParams as CoreSamplingParams
from .engine import LLMEngine
from .outputs import RequestOutput
from .params import RequestOutputKind, SamplingParams


class LLM(CoreLLM):
    llm_engine: LLMEngine

    def build_engine(self, config: EngineConfig) -> LLMEngine:
        return LLMEngine(config)

    def generate(self, prompts: Prompts, sampling_params: Params = None) -> list[RequestOutput]:  # type: ignore[override]
        """As core does, whatever their output_kind: nobody looks at an output before the last."""
        return cast(list[RequestOutput], super().generate(prompts, final_only(sampling_params)))

    def stream(self, prompts: Prompts, sampling_params: Params = None) -> abc.Generator[RequestOutput, None, None]:
        return told(super().stream(prompts, sampling_params))

    def beam_search(self, prompts: Prompts, params: BeamSearchParams) -> list[RequestOutput]:  # type: ignore[override]
        return [RequestOutput.of(output) for output in super().beam_search(prompts, params)]


def final_only(sampling_params: Params) -> Params:
    """The same parameters, but for one output a request. What is none is left for pair() to name."""
    if isinstance(sampling_params, CoreSamplingParams | None):
        params = copy.copy(SamplingParams.of(sampling_params or SamplingParams()))
        params.output_kind = RequestOutputKind.FINAL_ONLY
        return params
    if isinstance(sampling_params, list | tuple):
        return [final_only(each) for each in sampling_params]  # type: ignore[misc]
    return sampling_params


def told(stream: abc.Generator[CoreRequestOutput, None, None]) -> abc.Generator[RequestOutput, None, None]:
    """Of a request that core has refused, an output like the others. Closing it closes the stream."""
    with closing(stream):
        for output in stream:
            yield RequestOutput.of(output)
