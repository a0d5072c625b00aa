"""AsyncLLM: the bridge from asyncio to an engine. Many callers, each with `async for output in llm.generate(...)`.

One thread alone touches the engine: it takes calls from any thread, and steps while a request is unfinished.

    callers' threads          inbox (a queue)          the engine's thread
    call(function)     -->    function, Future    -->  [calls that are waiting] [a step] [calls] [a step] ...
    Stream.put() in its loop  <------------------------- outputs of a step

A call waits for one step at most. An error of a step ends the thread: all callers that wait get an EngineDeadError.
"""

import asyncio
import threading
import weakref
from collections import abc, deque
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any

from .checkpoints.tokenizer import HFTokenizer
from .engine.config import EngineArgs
from .engine.llm_engine import LLMEngine, listed_ids
from .engine.outputs import RequestOutput
from .engine.prompts import PromptType
from .engine.sampling_params import RequestOutputKind, SamplingParams
from .engine.stats import EngineStats, Metric
from .engine.vllm_options import refuse

Call = abc.Callable[[LLMEngine], Any]


class EngineDeadError(RuntimeError):
    """The engine has ended: by an error, which is its cause, or by shutdown()."""


class AsyncLLM:
    """An engine for many callers. Its methods may be called in any event loop and thread."""

    def __init__(self, engine_args: EngineArgs) -> None:
        """Build the engine. Raise ValueError for a bad value or checkpoint.

        shutdown() ends it, and so does the end of the program.
        """
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
        """Build one with vLLM's arguments; `usage_context` has no effect here."""
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

        Leaving the loop, or cancelling it, aborts the request: its blocks come free before the next step. Raise
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
        """End requests: their callers get a last output that says "abort". Ids of no request are ignored."""
        request_ids = listed_ids(request_id)
        with suppress(EngineDeadError):
            await self._call(partial(self._thread.abort_all, request_ids=request_ids))

    def shutdown(self, timeout: float | None = None) -> None:
        """End after the current step, and wait for it at most `timeout` seconds. It may be called several times.

        Callers that still wait for outputs get EngineDeadError.
        """
        self._thread.stop(timeout)

    async def check_health(self) -> None:
        """Raise EngineDeadError if the engine has ended."""
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
    def tokenizer(self) -> HFTokenizer | None:
        return self._thread.engine.tokenizer

    def get_tokenizer(self) -> HFTokenizer:
        """Return the tokenizer. Raise ValueError if there is none."""
        return self._thread.engine.get_tokenizer()

    async def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """Empty the prefix cache. Return False, and change nothing, while a request runs."""
        return await self._call(lambda engine: engine.reset_prefix_cache(reset_running_requests, reset_connector))

    def stats(self) -> EngineStats:
        """Return the state of queues and pools, and counts since the start. Wait for a step at most, as get_metrics."""
        return self._thread.ask(lambda engine: engine.stats())

    def get_metrics(self) -> list[Metric]:
        """Return the same under vLLM's names."""
        return self._thread.ask(lambda engine: engine.get_metrics())

    async def _call(self, function: abc.Callable[[LLMEngine], Any]) -> Any:
        return await asyncio.wrap_future(self._thread.call(function))

    def _forget(self, request_id: str, stream: "Stream") -> None:
        """End a request that has no caller any more, and do not wait for it: a generator that is closed cannot."""
        with suppress(EngineDeadError):
            self._thread.call(partial(self._thread.abort, request_id=request_id, stream=stream))


AsyncLLMEngine = AsyncLLM  # its older name, which vLLM has kept


class Stream:
    """The outputs of one request, on their way to a caller in an event loop."""

    def __init__(self, is_cumulative: bool) -> None:
        self.loop = asyncio.get_running_loop()
        self._is_cumulative = is_cumulative
        self._outputs: deque[RequestOutput | BaseException] = deque()
        self._news = asyncio.Event()

    def put(self, output: RequestOutput | BaseException) -> None:
        """Store an output, in the loop's thread. One that holds all so far replaces one that was not fetched yet."""
        if self._is_cumulative and not isinstance(output, BaseException):
            self._outputs.clear()
        self._outputs.append(output)
        self._news.set()

    async def get(self) -> RequestOutput:
        """Wait for the next output. Raise the error that came in its place."""
        while not self._outputs:
            self._news.clear()
            await self._news.wait()
        output = self._outputs.popleft()
        if isinstance(output, BaseException):
            raise output
        return output


class EngineThread:
    """The thread that builds an engine, and alone touches it."""

    def __init__(self, build: abc.Callable[[], LLMEngine]) -> None:
        """Build the engine in its thread. Raise the error that `build` raises."""
        self.error: BaseException | None = None  # what has ended it
        self._inbox: SimpleQueue[tuple[Call, Future] | None] = SimpleQueue()
        self._streams: dict[str, Stream] = {}  # by request; touched by the engine's thread alone
        self._lock = threading.Lock()  # between a call and the end: no call is left without an answer
        self._has_ended = False
        is_built: Future[LLMEngine] = Future()
        self._thread = threading.Thread(target=self._run, args=(build, is_built), name="nanovllm engine", daemon=True)
        self._thread.start()
        self.engine = is_built.result()  # for what any thread may ask

    @property
    def has_ended(self) -> bool:
        return self._has_ended

    def call(self, function: Call) -> Future:
        """Run `function(engine)` between two steps. Raise EngineDeadError if the engine has ended."""
        answer: Future = Future()
        with self._lock:
            if self._has_ended:
                raise self.dead_error()
            self._inbox.put((function, answer))
        return answer

    def ask(self, function: Call) -> Any:
        """Return `function(engine)`, computed between two steps: in one, a sequence that ends would be counted twice
        or not at all. Once the engine has ended nothing changes any more.
        """
        if threading.current_thread() is not self._thread:
            with suppress(EngineDeadError):
                return self.call(function).result()
        return function(self.engine)

    def add(self, engine: LLMEngine, stream: Stream, request_id: str, **request: Any) -> None:
        """Add a request, in the engine's thread. Raise ValueError for one that it cannot serve."""
        engine.add_request(request_id, **request)
        self._streams[request_id] = stream

    def abort(self, engine: LLMEngine, request_id: str, stream: Stream | None = None) -> None:
        """End a request, in the engine's thread; with a `stream` only its own: the name may have been used again."""
        if stream is not None and self._streams.get(request_id) is not stream:
            return
        output = engine.abort_request(request_id)
        if output is not None:
            self._deliver([output])

    def abort_all(self, engine: LLMEngine, request_ids: list[str]) -> None:
        """End several requests, in the engine's thread."""
        for request_id in request_ids:
            self.abort(engine, request_id)

    def dead_error(self) -> EngineDeadError:
        """Return a new error for each caller: an exception that several raise mixes up their tracebacks."""
        why = "it was shut down" if self.error is None else f"{type(self.error).__name__}: {self.error}"
        error = EngineDeadError(f"the engine has ended: {why}")
        error.__cause__ = self.error
        return error

    def stop(self, timeout: float | None = None) -> None:
        """End the thread after the current step. Callers that still wait get EngineDeadError."""
        with self._lock:
            if not self._has_ended:
                self._inbox.put(None)
        if self._thread is not threading.current_thread():
            self._thread.join(timeout)

    def _run(self, build: abc.Callable[[], LLMEngine], is_built: Future) -> None:
        try:
            engine = build()
        except BaseException as error:
            self._has_ended = True
            is_built.set_exception(error)
            return
        is_built.set_result(engine)
        try:
            while self._answer_calls(engine):
                if engine.has_unfinished_requests():
                    self._deliver(engine.step(), engine)
        except BaseException as error:
            self.error = error
        self._end(engine)

    def _answer_calls(self, engine: LLMEngine) -> bool:
        """Answer all calls that wait; if the engine is idle, wait for one. Return False when it is time to end."""
        while True:
            try:
                call = self._inbox.get(block=not engine.has_unfinished_requests())
            except Empty:
                return True
            if call is None:
                return False
            answer(call, engine)

    def _deliver(self, outputs: list[RequestOutput], engine: LLMEngine | None = None) -> None:
        """Give outputs to their callers, with one call for each event loop.

        A loop that is closed has no callers: with an `engine`, their requests are aborted.
        """
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[Stream, Any]]] = {}
        for output in outputs:
            stream = self._streams[output.request_id]
            by_loop.setdefault(stream.loop, []).append((stream, output))
            if output.finished:
                del self._streams[output.request_id]
        for loop, pairs in by_loop.items():
            if not put_all(loop, pairs) and engine is not None:
                for request_id in [name for name, stream in self._streams.items() if stream.loop is loop]:
                    del self._streams[request_id]
                    engine.abort_request(request_id)

    def _end(self, engine: LLMEngine) -> None:
        with self._lock:
            self._has_ended = True
        while True:
            try:
                call = self._inbox.get(block=False)
            except Empty:
                break
            if call is not None and call[1].set_running_or_notify_cancel():
                call[1].set_exception(self.dead_error())
        for stream in self._streams.values():
            put_all(stream.loop, [(stream, self.dead_error())])
        self._streams.clear()
        if self.error is None:  # else nobody knows what state it is in
            engine.abort_request(list(engine.requests))
        engine.kernels.close()


def answer(call: tuple[Call, Future], engine: LLMEngine) -> None:
    """Run a call; an error of it goes to its caller."""
    function, future = call
    if future.set_running_or_notify_cancel():
        try:
            future.set_result(function(engine))
        except BaseException as error:
            future.set_exception(error)
            if not isinstance(error, Exception):  # it ends the thread, and leaves nobody waiting
                raise


def put_all(loop: asyncio.AbstractEventLoop, pairs: list[tuple[Stream, Any]]) -> bool:
    """Put outputs into streams of one loop. Return False if the loop is closed."""

    def put() -> None:
        for stream, output in pairs:
            stream.put(output)

    try:
        loop.call_soon_threadsafe(put)
    except RuntimeError:
        return False
    return True
