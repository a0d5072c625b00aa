"""LLM: prompts in, outputs out. Each call adds its requests to the engine and steps it until they have ended."""

import itertools
from collections import abc
from contextlib import closing
from pathlib import Path
from typing import Any

from .beam_search import BeamSearch, BeamSearchParams
from .config import EngineConfig
from .engine import LLMEngine
from .input_processor import Prompt
from .interrupts import interrupts_held_back
from .kv_cache import PoolReport
from .outputs import RequestOutput
from .sampling_params import SamplingParams

Prompts = Prompt | abc.Sequence[Prompt]
Params = SamplingParams | abc.Sequence[SamplingParams] | None  # one for all prompts, or one for each


class LLM:
    """The engine: LLM(model="models/storyteller", kv_cache_tokens=8192).generate("Once upon a time")

    An LLM belongs to one thread, and has one open stream() at a time.
    """

    def __init__(self, model: str | Path = EngineConfig.model, **options: Any) -> None:
        """`options` are the other fields of EngineConfig. Raises ValueError for a bad value or checkpoint."""
        self.config = EngineConfig(str(model) if isinstance(model, Path) else model, **options)
        self.llm_engine = engine = self.build_engine(self.config)
        self.tokenizer, self.model_config = engine.tokenizer, engine.model_config
        self.max_model_len = engine.max_model_len
        self.kv_cache, self.kv_cache_manager = engine.kv_cache, engine.kv_cache_manager
        self.model_runner, self.input_processor = engine.model_runner, engine.input_processor
        self._request_ids = map(str, itertools.count())
        self._is_streaming = False

    @property
    def peak(self) -> PoolReport:
        """The pool when most of it was held, in the engine's life."""
        return self.kv_cache_manager.peak

    def generate(self, prompts: Prompts, sampling_params: Params = None) -> list[RequestOutput]:
        """One finished output a prompt, in the order of the prompts.

        A request that cannot be served ends with finish_reason "error" and RequestOutput.error, in its place.
        """
        # Without closing(), the traceback of an error would keep the generator alive, and so its requests unfinished.
        with closing(self.stream(prompts, sampling_params)) as outputs:
            finished = [output for output in outputs if output.finished]
        return sorted(finished, key=lambda output: int(output.request_id))

    def stream(self, prompts: Prompts, sampling_params: Params = None) -> abc.Generator[RequestOutput, None, None]:
        """Yield a request's output so far whenever it got a token. Closing the iterator aborts what has not ended.

        Raises ValueError at once if there are not as many sampling_params as prompts, and when it begins if another
        stream() of this LLM is open, or if the engine has requests that were added to `llm_engine`.
        """
        return self._serve(pair(prompts, sampling_params))

    def _serve(self, requests: list[tuple[Prompt, SamplingParams]]) -> abc.Generator[RequestOutput, None, None]:
        if self._is_streaming or self.llm_engine.has_unfinished_requests():
            raise ValueError("another stream() is open, or the engine has unfinished requests: drain or close it first")
        request_ids = list(itertools.islice(self._request_ids, len(requests)))
        with interrupts_held_back() as between_steps:
            try:
                self._is_streaming = True
                outputs = []
                for request_id, (prompt, params) in zip(request_ids, requests, strict=True):
                    try:
                        self.llm_engine.add_request(request_id, prompt, params)
                    except ValueError as error:
                        outputs.append(RequestOutput.failed(request_id, prompt, str(error)))
                with between_steps:
                    yield from outputs
                while self.llm_engine.has_unfinished_requests():
                    outputs = self.llm_engine.step()
                    with between_steps:
                        yield from outputs
            finally:
                self._is_streaming = False
                for request_id in request_ids:
                    self.llm_engine.abort_request(request_id)

    def beam_search(self, prompts: Prompts, params: BeamSearchParams) -> list[RequestOutput]:
        """One output a prompt, in the order of the prompts, each with beam_width completions, the best first.

        A request that cannot be served ends with finish_reason "error", as in generate(). Raises ValueError if the
        engine has unfinished requests: the beams of a prompt have it to themselves.
        """
        if self.llm_engine.has_unfinished_requests():
            raise ValueError("beam_search needs the engine for itself, and it has unfinished requests")
        search = BeamSearch(self.llm_engine, params)
        return [search.run(next(self._request_ids), prompt) for prompt, _ in pair(prompts, None)]

    def reset_prefix_cache(self) -> bool:
        """Forget what is cached. Returns False, and changes nothing, while a request runs."""
        return self.kv_cache_manager.reset_prefix_cache()

    def build_engine(self, config: EngineConfig) -> LLMEngine:
        """A subclass may build an engine that does more."""
        return LLMEngine(config)


def pair(prompts: Prompts, sampling_params: Params) -> list[tuple[Prompt, SamplingParams]]:
    """Each prompt with its parameters. Raises ValueError for what is neither, or if their numbers differ.

    >>> [params.max_tokens for _, params in pair(["a", "b"], SamplingParams(max_tokens=4))]
    [4, 4]
    """
    if not isinstance(prompts, abc.Sequence):
        raise ValueError(f"prompts must be a text, token ids or a list of such prompts, not {type(prompts).__name__}")
    if isinstance(prompts, str) or (prompts and isinstance(prompts[0], int)):
        prompts = [prompts]  # type: ignore
    if sampling_params is None or isinstance(sampling_params, SamplingParams):
        sampling_params = [sampling_params or SamplingParams()] * len(prompts)
    given = sampling_params if isinstance(sampling_params, abc.Sequence) else [sampling_params]
    strangers = [type(params).__name__ for params in given if not isinstance(params, SamplingParams)]
    if strangers:
        raise ValueError(f"sampling_params must be one SamplingParams or a list of them, not {strangers[0]}")
    if len(prompts) != len(sampling_params):
        raise ValueError(f"{len(prompts)} prompts but {len(sampling_params)} sampling_params")
    return list(zip(prompts, sampling_params, strict=True))  # type: ignore[arg-type]
