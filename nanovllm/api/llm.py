"""LLM, with an engine that tells log-probabilities."""

from collections import abc
from contextlib import closing

from ..core.beam_search import BeamSearchParams
from ..core.config import EngineConfig
from ..core.llm import LLM as CoreLLM
from ..core.llm import Params, Prompts
from ..core.outputs import RequestOutput as CoreRequestOutput
from .engine import LLMEngine
from .outputs import RequestOutput


class LLM(CoreLLM):
    llm_engine: LLMEngine

    def build_engine(self, config: EngineConfig) -> LLMEngine:
        return LLMEngine(config)

    def stream(self, prompts: Prompts, sampling_params: Params = None) -> abc.Generator[RequestOutput, None, None]:
        return told(super().stream(prompts, sampling_params))

    def beam_search(self, prompts: Prompts, params: BeamSearchParams) -> list[RequestOutput]:  # type: ignore[override]
        return [RequestOutput.of(output) for output in super().beam_search(prompts, params)]


def told(stream: abc.Generator[CoreRequestOutput, None, None]) -> abc.Generator[RequestOutput, None, None]:
    """Of a request that core has refused, an output like the others. Closing it closes the stream."""
    with closing(stream):
        for output in stream:
            yield RequestOutput.of(output)
