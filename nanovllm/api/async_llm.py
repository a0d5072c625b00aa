"""AsyncLLM: many callers of one engine, each with `async for output in engine.generate(...)`."""

import asyncio
import weakref
from collections import abc
from contextlib import suppress
from functools import partial
from typing import Any

from .engine_args import EngineArgs
from .engine_thread import EngineDeadError, EngineThread, Stream
from .llm_engine import LLMEngine, listed_ids
from .metrics import Metric
from .only_in_vllm import refuse
from .outputs import RequestOutput
from .params import RequestOutputKind, SamplingParams
from .prompts import PromptType
from .stats import EngineStats


class AsyncLLM:
    """Methods may be called in any event loop and thread: the engine has one of its own."""

    def __init__(self, engine_args: EngineArgs) -> None:
        """Raises ValueError for a bad value or checkpoint. shutdown() ends it, and so does the program's end."""
        self._thread = EngineThread(partial(LLMEngine.from_engine_args, engine_args))
        self._finalizer = weakref.finalize(self, self._thread.stop)

    @classmethod
    def from_engine_args(
        cls,
        engine_args: EngineArgs,
        start_engine_loop: bool = True,
        usage_context: Any = None,
        stat_loggers: Any = None,
    ) -> "AsyncLLM":
        """`usage_context` says nothing here."""
        refuse(stat_loggers=stat_loggers)
        if not start_engine_loop:
            raise ValueError("vLLM has start_engine_loop=False, nanovllm has not: leave it at True")
        return cls(engine_args)

    async def generate(
        self,
        prompt: PromptType,
        sampling_params: SamplingParams,
        request_id: str,
        *,
        prompt_text: str | None = None,
        lora_request: Any = None,
        tokenization_kwargs: dict[str, Any] | None = None,
        trace_headers: Any = None,
        priority: int = 0,
        data_parallel_rank: int | None = None,
        session_id: str | None = None,
        kv_hints: Any = None,
        reasoning_ended: bool | None = None,
        reasoning_parser_kwargs: dict[str, Any] | None = None,
    ) -> abc.AsyncGenerator[RequestOutput, None]:
        """Yield the request's outputs as they come, of the kind that sampling_params.output_kind asks for.

        To stop iterating, or to be cancelled, aborts the request: its blocks come free before the next step. Raises
        ValueError for a request that cannot be served, and EngineDeadError if the engine has ended.
        """
        refuse(data_parallel_rank=data_parallel_rank, reasoning_ended=reasoning_ended)
        refuse(reasoning_parser_kwargs=reasoning_parser_kwargs)
        sampling_params = SamplingParams.of(sampling_params)
        given: dict[str, Any] = {"lora_request": lora_request, "trace_headers": trace_headers, "priority": priority}
        given |= {"session_id": session_id, "kv_hints": kv_hints, "tokenization_kwargs": tokenization_kwargs}
        given |= {"prompt": prompt, "params": sampling_params, "prompt_text": prompt_text}
        stream = Stream(is_cumulative=sampling_params.output_kind is not RequestOutputKind.DELTA)
        is_finished = False
        try:
            await self._call(partial(self._thread.add, stream=stream, request_id=request_id, **given))
            while not is_finished:
                output = await stream.get()
                is_finished = output.finished
                yield output
        finally:
            if not is_finished:
                self._forget(request_id, stream)

    async def abort(self, request_id: str | abc.Iterable[str], internal: bool = False) -> None:
        """End requests: their callers get a last output that says "abort". A name that is not here is passed over."""
        request_ids = listed_ids(request_id)
        if not self.errored:
            await self._call(partial(self._thread.abort_all, request_ids=request_ids))

    def shutdown(self, timeout: float | None = None) -> None:
        """End after the step that is being computed, and wait for it at most `timeout` seconds; no matter how often.

        Callers that still wait for outputs get EngineDeadError.
        """
        self._thread.stop(timeout)

    async def check_health(self) -> None:
        """Raises EngineDeadError if the engine has ended."""
        if self.errored:
            raise self.dead_error

    @property
    def is_running(self) -> bool:
        return not self._thread.has_ended

    @property
    def is_stopped(self) -> bool:
        return self._thread.has_ended

    @property
    def errored(self) -> bool:
        return self._thread.has_ended

    @property
    def dead_error(self) -> EngineDeadError:
        return self._thread.dead_error()

    def get_num_unfinished_requests(self) -> int:
        return self._thread.engine.get_num_unfinished_requests()

    @property
    def tokenizer(self) -> Any:
        return self._thread.engine.tokenizer

    def get_tokenizer(self) -> Any:
        """Raises ValueError if there is none."""
        return self._thread.engine.get_tokenizer()

    async def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        return await self._call(lambda engine: engine.reset_prefix_cache(reset_running_requests, reset_connector))

    def stats(self) -> EngineStats:
        return self._thread.engine.stats()

    def get_metrics(self) -> list[Metric]:
        return self._thread.engine.get_metrics()

    async def _call(self, function: abc.Callable[[LLMEngine], Any]) -> Any:
        return await asyncio.wrap_future(self._thread.call(function))

    def _forget(self, request_id: str, stream: Stream) -> None:
        """Nobody waits for its outputs any more. It is not waited for either: a generator that is closed cannot."""
        with suppress(EngineDeadError):
            self._thread.call(partial(self._thread.abort, request_id=request_id, stream=stream))


AsyncLLMEngine = AsyncLLM  # its older name, which vLLM has kept
