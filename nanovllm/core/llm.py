"""LLM: prompts in, outputs out. Each call adds its requests to the engine and steps it until they have ended."""

import itertools
from collections import abc, deque
from pathlib import Path
from typing import Any

from .beam_search import BeamSearch, BeamSearchParams
from .block_pool import NoFreeBlocks
from .config import EngineConfig
from .engine import LLMEngine
from .input_processor import Prompt
from .kv_cache import PoolReport
from .outputs import RequestOutput
from .sampling import SamplingParams

Prompts = Prompt | abc.Sequence[Prompt]
Params = SamplingParams | abc.Sequence[SamplingParams] | None  # one for all prompts, or one for each


class LLM:
    """The engine: LLM(model="models/storyteller", kv_cache_tokens=8192).generate("Once upon a time")"""

    def __init__(self, model: str | Path = EngineConfig.model, **options: Any) -> None:
        """`options` are the other fields of EngineConfig. Raises ValueError for a bad value or checkpoint."""
        self.config = EngineConfig(str(model), **options)
        self.llm_engine = engine = LLMEngine(self.config)
        self.tokenizer, self.model_config = engine.tokenizer, engine.model_config
        self.max_model_len = engine.max_model_len
        self.kv_cache, self.block_manager = engine.kv_cache, engine.block_manager
        self.model_runner = engine.model_runner
        self._request_ids = map(str, itertools.count())
        self._inboxes: dict[str, deque[RequestOutput]] = {}  # by request: what its stream has not yet yielded

    @property
    def peak(self) -> PoolReport:
        """The pool when most of it was used, in the engine's life."""
        return self.llm_engine.peak

    def generate(self, prompts: Prompts, sampling_params: Params = None) -> list[RequestOutput]:
        """One finished output a prompt, in the order of the prompts.

        A request that cannot be served ends with finish_reason "error" and RequestOutput.error, in its place.
        """
        finished = [output for output in self.stream(prompts, sampling_params) if output.finished]
        return sorted(finished, key=lambda output: int(output.request_id))

    def stream(self, prompts: Prompts, sampling_params: Params = None) -> abc.Iterator[RequestOutput]:
        """Yield a request's output so far whenever it got a token. Closing the iterator aborts what has not ended.

        Raises ValueError at once if there are not as many sampling_params as prompts. What its steps compute for
        requests that were added to `llm_engine` directly is told to nobody: drive the engine by one of the two.
        """
        return self._serve(pair(prompts, sampling_params))

    def reset_prefix_cache(self) -> bool:
        """Forget all cached blocks. False, and nothing happens, while requests are being served."""
        return self.block_manager.reset_prefix_cache()

    def beam_search(self, prompts: Prompts, params: BeamSearchParams) -> list[RequestOutput]:
        """One output a prompt, in the order of the prompts, each with beam_width completions, the best first.

        A request that cannot be served ends with finish_reason "error", as in generate(). Raises ValueError if other
        requests are being served: the beams of a prompt have the engine to themselves.
        """
        if self.llm_engine.has_unfinished_requests():
            raise ValueError("beam_search needs the engine for itself, and it has unfinished requests")
        return [self._search(prompt, params) for prompt, _ in pair(prompts, None)]

    def _search(self, prompt: Prompt, params: BeamSearchParams) -> RequestOutput:
        request_id = next(self._request_ids)
        try:
            return BeamSearch(self.llm_engine, params).run(request_id, prompt)
        except (ValueError, NoFreeBlocks) as error:
            return RequestOutput.failed(request_id, prompt, str(error))

    def _serve(self, requests: list[tuple[Prompt, SamplingParams]]) -> abc.Iterator[RequestOutput]:
        """Step the engine until these have ended. What it computes for another open stream waits for that one."""
        inbox: deque[RequestOutput] = deque()
        request_ids: deque[str] = deque()
        try:
            for prompt, params in requests:
                request_ids.append(self._add(prompt, params, inbox))
            while inbox or self._are_served(request_ids):
                if inbox:
                    yield inbox.popleft()
                else:
                    self._step()
        finally:
            for request_id in request_ids:
                if self._inboxes.pop(request_id, None) is not None:
                    self.llm_engine.abort_request(request_id)

    def _add(self, prompt: Prompt, params: SamplingParams, inbox: deque[RequestOutput]) -> str:
        """Its request id. Of a request that cannot be served the error is in the inbox at once."""
        request_id = next(number for number in self._request_ids if not self.llm_engine.has_request(number))
        try:
            self.llm_engine.add_request(request_id, prompt, params)
            self._inboxes[request_id] = inbox
        except ValueError as error:
            inbox.append(RequestOutput.failed(request_id, prompt, str(error)))
        return request_id

    def _are_served(self, request_ids: deque[str]) -> bool:
        """Whether one of these is still in the engine. Those in front that have ended, or were aborted there, go."""
        while request_ids:
            if request_ids[0] in self._inboxes and self.llm_engine.has_request(request_ids[0]):
                return True
            self._inboxes.pop(request_ids.popleft(), None)
        return False

    def _step(self) -> None:
        for output in self.llm_engine.step():
            if output.request_id in self._inboxes:  # not a request that was added to the engine directly
                self._inboxes[output.request_id].append(output)
                if output.finished:
                    del self._inboxes[output.request_id]


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
