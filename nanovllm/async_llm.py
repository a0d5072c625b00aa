"""AsyncLLM: an engine for asyncio programs, shared by many callers of `async for output in llm.generate(...)`.

Only one thread uses the engine. That thread runs calls from all other threads between steps, and keeps stepping as
long as any request is unfinished.

    a caller's thread         inbox (a queue)     the engine's thread
    call(function)     -->    Call           -->  [pending calls] [a step] [pending calls] [a step] ...
    Stream.put() in the caller's event loop  <----- outputs of a step

A call waits for at most one step. If a step raises, the thread ends, and all waiting callers get an EngineDeadError.
"""

import asyncio
import threading
import weakref
from collections import abc, deque
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, Generic, Self, TypeVar

from .checkpoints.tokenizer import HFTokenizer
from .checks import check_unsupported
from .llm_engine import LLMEngine
from .metrics import Metric
from .options.engine_args import EngineArgs
from .requests.outputs import RequestOutput
from .requests.prompts import PromptType
from .requests.sampling_params import RequestOutputKind, SamplingParams
from .stats import EngineStats

Result = TypeVar("Result")
RANK_CHECK_SECONDS = 1.0  # how often an idle engine checks that its other ranks are alive


class EngineDeadError(RuntimeError):
    """The error raised once the engine has ended, either by shutdown() or by the failure in `__cause__`."""


class AsyncLLM:
    """An engine that many callers can share, from any event loop and thread."""

    def __init__(self, engine_args: EngineArgs) -> None:
        """Build the engine. Raise ValueError for an invalid option or checkpoint.

        The engine runs until shutdown(), or until this object is garbage-collected or the program exits.
        """
        engine_args.check_single_process()
        self._thread = EngineThread(partial(LLMEngine.from_engine_args, engine_args))
        self._finalizer = weakref.finalize(self, self._thread.stop)

    @classmethod
    def from_engine_args(
        cls,
        engine_args: EngineArgs,
        start_engine_loop: bool = True,
        usage_context: object = None,
        stat_loggers: object = None,
    ) -> Self:
        """Build an engine. The arguments are vLLM's.

        `usage_context` has no effect. Raise ValueError if `start_engine_loop` is False or `stat_loggers` is set.
        """
        check_unsupported(stat_loggers=stat_loggers)
        if not start_engine_loop:
            raise ValueError("start_engine_loop must be True, got False")
        return cls(engine_args)

    async def generate(
        self,
        prompt: PromptType,
        sampling_params: SamplingParams,
        request_id: str,
        *,
        prompt_text: str | None = None,
        lora_request: object = None,
        tokenization_kwargs: dict[str, Any] | None = None,
        trace_headers: object = None,
        priority: int = 0,
        data_parallel_rank: int | None = None,
        session_id: str | None = None,
        kv_hints: object = None,
        reasoning_ended: bool | None = None,
        reasoning_parser_kwargs: dict[str, Any] | None = None,
    ) -> abc.AsyncGenerator[RequestOutput, None]:
        """Yield the outputs of a request as they are generated, in the form that sampling_params.output_kind selects.

        Breaking out of the loop, or cancelling it, aborts the request and frees its blocks before the next step. Raise
        ValueError for a request that cannot be served, and EngineDeadError if the engine has ended.
        """
        check_unsupported(lora_request=lora_request, trace_headers=trace_headers, priority=priority)
        check_unsupported(session_id=session_id, kv_hints=kv_hints, data_parallel_rank=data_parallel_rank)
        check_unsupported(reasoning_ended=reasoning_ended, reasoning_parser_kwargs=reasoning_parser_kwargs)
        sampling_params = SamplingParams.of(sampling_params)
        add_request = partial(
            LLMEngine.add_request,
            request_id=request_id,
            prompt=prompt,
            params=sampling_params,
            tokenization_kwargs=tokenization_kwargs,
            prompt_text=prompt_text,
        )
        stream = Stream(is_cumulative=sampling_params.output_kind is not RequestOutputKind.DELTA)
        is_finished = False
        try:
            await self._call(partial(self._thread.add, add_request=add_request, stream=stream))
            while not is_finished:
                output = await stream.get()
                is_finished = output.finished
                yield output
        finally:
            if not is_finished:
                with suppress(EngineDeadError):  # don't wait for the result: a generator that is being closed can't
                    self._thread.call(partial(self._thread.abort, request_ids=[request_id], stream=stream))

    async def abort(self, request_id: str | abc.Iterable[str], internal: bool = False) -> None:
        """Abort requests. Each caller gets a final output with finish_reason "abort". Unknown ids are ignored."""
        request_ids = [request_id] if isinstance(request_id, str) else list(request_id)
        with suppress(EngineDeadError):
            await self._call(partial(self._thread.abort, request_ids=request_ids))

    def shutdown(self, timeout: float | None = None) -> None:
        """Stop the engine after the current step, and wait up to `timeout` seconds for it to stop.

        Callers still waiting for outputs get an EngineDeadError. Calling shutdown() again only waits.
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
        """Return the tokenizer. Raise ValueError if the checkpoint has none."""
        return self._thread.engine.get_tokenizer()

    async def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """Empty the prefix cache in all tiers, disk included. Return False, and change nothing, while a request runs.

        With `reset_running_requests`, preempt all running requests first. `reset_connector` has no effect.
        """
        return await self._call(lambda engine: engine.reset_prefix_cache(reset_running_requests, reset_connector))

    async def start_profile(self, profile_prefix: str | None = None) -> None:
        """Start a profile, configured by profiler_config, that names the parts of each step. stop_profile() ends it."""
        await self._call(lambda engine: engine.start_profile(profile_prefix))

    async def stop_profile(self) -> None:
        """Stop the profile, and write its trace. Raise ValueError if no profile is being recorded."""
        await self._call(lambda engine: engine.stop_profile())

    def stats(self) -> EngineStats:
        """Return the state of the queues and pools, and counts since the engine's start. Wait for at most one step."""
        return self._thread.ask(lambda engine: engine.stats())

    def get_metrics(self) -> list[Metric]:
        """Return the statistics as metrics with vLLM's names. Wait for at most one step."""
        return self._thread.ask(lambda engine: engine.get_metrics())

    async def _call(self, function: abc.Callable[[LLMEngine], Result]) -> Result:
        return await asyncio.wrap_future(self._thread.call(function))


AsyncLLMEngine = AsyncLLM  # the older name, which vLLM also keeps


class Stream:
    """A queue that brings the outputs of one request to its caller's event loop."""

    def __init__(self, is_cumulative: bool) -> None:
        self.loop = asyncio.get_running_loop()
        self._is_cumulative = is_cumulative
        self._outputs: deque[RequestOutput | BaseException] = deque()
        self._has_outputs = asyncio.Event()

    def put(self, output: RequestOutput | BaseException) -> None:
        """Add an output or an error, in the loop's thread. Replace waiting outputs if they are cumulative."""
        if self._is_cumulative and not isinstance(output, BaseException):
            self._outputs.clear()
        self._outputs.append(output)
        self._has_outputs.set()

    async def get(self) -> RequestOutput:
        """Wait for the next output and return it. If it is an error, raise it."""
        while not self._outputs:
            self._has_outputs.clear()
            await self._has_outputs.wait()
        output = self._outputs.popleft()
        if isinstance(output, BaseException):
            raise output
        return output


@dataclass
class Call(Generic[Result]):
    """A function to run in the engine's thread, and the future that receives its result."""

    function: abc.Callable[[LLMEngine], Result]
    future: Future[Result] = field(default_factory=Future)

    def run(self, engine: LLMEngine) -> None:
        """Run the function, unless the call was cancelled. Pass its result or its error to the caller."""
        if self.future.set_running_or_notify_cancel():
            try:
                self.future.set_result(self.function(engine))
            except BaseException as error:
                self.future.set_exception(error)
                if not isinstance(error, Exception):  # KeyboardInterrupt or SystemExit ends the thread
                    raise

    def fail(self, error: EngineDeadError) -> None:
        """Raise `error` in the caller."""
        if self.future.set_running_or_notify_cancel():
            self.future.set_exception(error)


class EngineThread:
    """The thread that builds the engine, and the only one that uses it."""

    def __init__(self, build: abc.Callable[[], LLMEngine]) -> None:
        """Build the engine in its thread. Raise the error that `build` raises."""
        self.error: BaseException | None = None  # the error that ended the thread
        self._inbox: SimpleQueue[Call[Any] | None] = SimpleQueue()  # None ends the thread
        self._streams: dict[str, Stream] = {}  # by request id; only the engine's thread uses it
        self._lock = threading.Lock()  # ensures that no call enters the inbox after the thread has emptied it
        self.has_ended = False
        ready: Future[LLMEngine] = Future()
        self._thread = threading.Thread(target=self._run, args=(build, ready), name="nanovllm engine", daemon=True)
        self._thread.start()
        self.engine = ready.result()  # for attributes that any thread may read

    def call(self, function: abc.Callable[[LLMEngine], Result]) -> Future[Result]:
        """Run `function(engine)` between two steps. Raise EngineDeadError if the engine has ended."""
        call = Call(function)
        with self._lock:
            if self.has_ended:
                raise self.dead_error()
            self._inbox.put(call)
        return call.future

    def ask(self, function: abc.Callable[[LLMEngine], Result]) -> Result:
        """Return `function(engine)`, computed between two steps, or immediately if the engine has ended.

        In the middle of a step, a sequence that is finishing could be counted twice or not at all.
        """
        if threading.current_thread() is not self._thread:
            with suppress(EngineDeadError):
                return self.call(function).result()
        return function(self.engine)

    def add(self, engine: LLMEngine, add_request: abc.Callable[[LLMEngine], str], stream: Stream) -> None:
        """Add a request, in the engine's thread. Raise ValueError if the request cannot be served."""
        self._streams[add_request(engine)] = stream

    def abort(self, engine: LLMEngine, request_ids: list[str], stream: Stream | None = None) -> None:
        """Abort requests, in the engine's thread. If `stream` is given, skip ids that now belong to another stream."""
        own_ids = [each for each in request_ids if stream in (None, self._streams.get(each))]
        self._deliver(engine.abort_request(own_ids))

    def dead_error(self) -> EngineDeadError:
        """Return a new EngineDeadError. Callers don't share one, because that would mix up their tracebacks."""
        reason = "it was shut down" if self.error is None else f"{type(self.error).__name__}: {self.error}"
        error = EngineDeadError(f"the engine has ended: {reason}")
        error.__cause__ = self.error
        return error

    def stop(self, timeout: float | None = None) -> None:
        """End the thread after the current step. Callers that are still waiting get an EngineDeadError."""
        with self._lock:
            if not self.has_ended:
                self._inbox.put(None)
        if self._thread is not threading.current_thread():
            self._thread.join(timeout)

    def _run(self, build: abc.Callable[[], LLMEngine], ready: Future[LLMEngine]) -> None:
        try:
            engine = build()
        except BaseException as error:
            self.has_ended = True
            ready.set_exception(error)
            return
        ready.set_result(engine)
        try:
            while self._answer_calls(engine):
                if engine.has_unfinished_requests():
                    self._deliver(engine.step(), engine)
        except BaseException as error:
            self.error = error
        self._end(engine)

    def _answer_calls(self, engine: LLMEngine) -> bool:
        """Run all pending calls. If the engine is idle, wait for a call. Return False once stop() has been called."""
        while True:
            try:
                timeout = None if engine.ranks.world_size == 1 else RANK_CHECK_SECONDS
                call = self._inbox.get(block=not engine.has_unfinished_requests(), timeout=timeout)
            except Empty:
                engine.ranks.check()
                return True
            if call is None:
                return False
            call.run(engine)

    def _deliver(self, outputs: list[RequestOutput], engine: LLMEngine | None = None) -> None:
        """Pass outputs to their callers, with one callback per event loop.

        If `engine` is given, abort the requests whose event loop is closed.
        """
        pairs_by_loop: dict[asyncio.AbstractEventLoop, list[tuple[Stream, RequestOutput | BaseException]]] = {}
        for output in outputs:
            stream = self._streams[output.request_id]
            pairs_by_loop.setdefault(stream.loop, []).append((stream, output))
            if output.finished:
                del self._streams[output.request_id]
        for loop, pairs in pairs_by_loop.items():
            if not put_all(loop, pairs) and engine is not None:
                for request_id in [id for id, stream in self._streams.items() if stream.loop is loop]:
                    del self._streams[request_id]
                    engine.abort_request(request_id)

    def _end(self, engine: LLMEngine) -> None:
        with self._lock:
            self.has_ended = True
        while True:
            try:
                call = self._inbox.get(block=False)
            except Empty:
                break
            if call is not None:
                call.fail(self.dead_error())
        for stream in self._streams.values():
            put_all(stream.loop, [(stream, self.dead_error())])
        self._streams.clear()
        if self.error is None:  # after an error, the engine is in an unknown state
            engine.abort_request(list(engine.requests))
        engine.kernels.close()
        engine.ranks.close()


def put_all(loop: asyncio.AbstractEventLoop, pairs: list[tuple[Stream, RequestOutput | BaseException]]) -> bool:
    """Put each output or error into its stream. All streams belong to `loop`. Return False if the loop is closed."""

    def put() -> None:
        for stream, output in pairs:
            stream.put(output)

    try:
        loop.call_soon_threadsafe(put)
    except RuntimeError:
        return False
    return True
