"""One thread that alone touches an engine: it takes calls from any thread, and steps while a request is unfinished.

    callers' threads          inbox (a queue)          the engine's thread
    call(function)     -->    function, Future    -->  [calls that are waiting] [a step] [calls] [a step] ...
    Stream.put() in its loop  <------------------------- outputs of a step

A call waits for one step at most. An error of a step ends the thread: all callers that wait get an EngineDeadError.
"""

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from queue import Empty, SimpleQueue
from typing import Any

from .llm_engine import LLMEngine
from .outputs import RequestOutput

Call = Callable[[LLMEngine], Any]


class EngineDeadError(RuntimeError):
    """The engine has ended: by an error, which is its cause, or by shutdown()."""


class Stream:
    """The outputs of one request, on their way to a caller in an event loop."""

    def __init__(self, is_cumulative: bool) -> None:
        self.loop = asyncio.get_running_loop()
        self._is_cumulative = is_cumulative
        self._outputs: deque[RequestOutput | BaseException] = deque()
        self._news = asyncio.Event()

    def put(self, output: RequestOutput | BaseException) -> None:
        """In the loop's thread. An output that holds all so far takes the place of one that was not fetched yet."""
        if self._is_cumulative and not isinstance(output, BaseException):
            self._outputs.clear()
        self._outputs.append(output)
        self._news.set()

    async def get(self) -> RequestOutput:
        """The next output, when it is there. Raises the error that came in its place."""
        while not self._outputs:
            self._news.clear()
            await self._news.wait()
        output = self._outputs.popleft()
        if isinstance(output, BaseException):
            raise output
        return output


class EngineThread:
    def __init__(self, build: Callable[[], LLMEngine]) -> None:
        """Build the engine in its thread. Raises what `build` raises."""
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
        """`function(engine)` runs between two steps. Raises EngineDeadError if there is none any more."""
        answer: Future = Future()
        with self._lock:
            if self._has_ended:
                raise self.dead_error()
            self._inbox.put((function, answer))
        return answer

    def add(self, engine: LLMEngine, stream: Stream, request_id: str, **request: Any) -> None:
        """In the engine's thread. Raises ValueError for a request that it cannot serve."""
        engine.add_request(request_id, **request)
        self._streams[request_id] = stream

    def abort(self, engine: LLMEngine, request_id: str, stream: Stream | None = None) -> None:
        """In the engine's thread. With a `stream` only its own request: another may have taken the name since."""
        if stream is not None and self._streams.get(request_id) is not stream:
            return
        output = engine.abort_request(request_id)
        if output is not None:
            self._deliver([RequestOutput.of(output)])

    def abort_all(self, engine: LLMEngine, request_ids: list[str]) -> None:
        """In the engine's thread."""
        for request_id in request_ids:
            self.abort(engine, request_id)

    def dead_error(self) -> EngineDeadError:
        """A new one for each caller: an exception that several raise mixes up their tracebacks."""
        why = "it was shut down" if self.error is None else f"{type(self.error).__name__}: {self.error}"
        error = EngineDeadError(f"the engine has ended: {why}")
        error.__cause__ = self.error
        return error

    def stop(self, timeout: float | None = None) -> None:
        """End after the step that is being computed. Callers that still wait get EngineDeadError."""
        with self._lock:
            if not self._has_ended:
                self._inbox.put(None)
        if self._thread is not threading.current_thread():
            self._thread.join(timeout)

    def _run(self, build: Callable[[], LLMEngine], is_built: Future) -> None:
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
                    self._deliver([RequestOutput.of(output) for output in engine.step()], engine)
        except BaseException as error:
            self.error = error
        self._end(engine)

    def _answer_calls(self, engine: LLMEngine) -> bool:
        """All that wait; if the engine has nothing to do, until one comes. Returns False when it is time to end."""
        while True:
            try:
                call = self._inbox.get(block=not engine.has_unfinished_requests())
            except Empty:
                return True
            if call is None:
                return False
            answer(call, engine)

    def _deliver(self, outputs: list[RequestOutput], engine: LLMEngine | None = None) -> None:
        """One call for each loop. One that is closed has no callers: with an `engine`, their requests are aborted."""
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
    """What a call raises is its caller's."""
    function, future = call
    if future.set_running_or_notify_cancel():
        try:
            future.set_result(function(engine))
        except BaseException as error:
            future.set_exception(error)
            if not isinstance(error, Exception):  # it ends the thread, and leaves nobody waiting
                raise


def put_all(loop: asyncio.AbstractEventLoop, pairs: list[tuple[Stream, Any]]) -> bool:
    """Returns False if the loop is closed."""

    def put() -> None:
        for stream, output in pairs:
            stream.put(output)

    try:
        loop.call_soon_threadsafe(put)
    except RuntimeError:
        return False
    return True
