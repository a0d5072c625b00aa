"""LLM: prompts in, outputs out. Each call adds its requests to the engine, and steps it until they have finished."""

import itertools
from collections import abc
from pathlib import Path
from typing import Any

from .config import EngineConfig
from .engine import LLMEngine
from .input_processor import Prompt
from .kv_cache import PoolReport
from .observer import Observer
from .outputs import RequestOutput
from .sampling import SamplingParams

Prompts = Prompt | abc.Sequence[Prompt]
Params = SamplingParams | abc.Sequence[SamplingParams] | None  # one for all prompts, or one for each


class LLM:
    """The engine: LLM(model="models/storyteller", kv_cache_tokens=8192).generate("Once upon a time")."""

    def __init__(
        self, model: str | Path = EngineConfig.model, observer: Observer | None = None, **options: Any
    ) -> None:
        """Load a checkpoint. `options` are the other fields of EngineConfig."""
        self.llm_engine = engine = LLMEngine(EngineConfig(str(model), **options), observer)
        self.config, self.max_model_len, self.observer = engine.config, engine.max_model_len, engine.observer
        self.model_config, self.tokenizer = engine.model_config, engine.tokenizer
        self.kv_cache, self.kv_cache_manager = engine.kv_cache, engine.kv_cache_manager
        self.model_runner, self.input_processor = engine.model_runner, engine.input_processor
        self._request_ids = map(str, itertools.count())

    @property
    def peak(self) -> PoolReport:
        """The pool when most of it was held, since the start."""
        return self.llm_engine.kv_cache_manager.peak

    def generate(self, prompts: Prompts, sampling_params: Params = None) -> list[RequestOutput]:
        """Return one finished output for each prompt, in their order.

        A request that cannot be served has finish_reason "error", and RequestOutput.error says why.
        """
        finished = [output for output in self.stream(prompts, sampling_params) if output.finished]
        return sorted(finished, key=lambda output: int(output.request_id))

    def stream(self, prompts: Prompts, sampling_params: Params = None) -> abc.Generator[RequestOutput, None, None]:
        """Yield the output of a request so far whenever it has a new token. Close the iterator to abort the rest."""
        return self._serve(pair(prompts, sampling_params))

    def _serve(self, requests: list[tuple[Prompt, SamplingParams]]) -> abc.Generator[RequestOutput, None, None]:
        """Add the requests, and step until all have finished. Yield the outputs of each step."""
        request_ids = list(itertools.islice(self._request_ids, len(requests)))
        try:
            for request_id, (prompt, params) in zip(request_ids, requests, strict=True):
                self.llm_engine.add_request(request_id, prompt, params)
            while self.llm_engine.has_unfinished_requests():
                yield from self.llm_engine.step()
        finally:  # the iterator was closed, or a step has failed
            for request_id in request_ids:
                self.llm_engine.abort_request(request_id)


def pair(prompts: Prompts, sampling_params: Params) -> list[tuple[Prompt, SamplingParams]]:
    """Return each prompt with its parameters. Raise ValueError if there are not as many of each.

    >>> [params.max_tokens for _, params in pair(["a", "b"], SamplingParams(max_tokens=4))]
    [4, 4]
    """
    if isinstance(prompts, str) or (prompts and isinstance(prompts[0], int)):
        prompts = [prompts]  # type: ignore
    if sampling_params is None or isinstance(sampling_params, SamplingParams):
        sampling_params = [sampling_params or SamplingParams()] * len(prompts)
    if len(prompts) != len(sampling_params):
        raise ValueError(f"{len(prompts)} prompts but {len(sampling_params)} sampling_params")
    return list(zip(prompts, sampling_params, strict=True))  # type: ignore[arg-type]
