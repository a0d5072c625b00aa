"""EngineClient: the web server's end of the pipe to the engine process. It belongs to one event loop."""

import asyncio
import itertools
import multiprocessing
import threading
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.util import Finalize
from queue import SimpleQueue
from typing import Any, Protocol

from ..async_llm import EngineDeadError
from ..engine.config import EngineArgs
from ..engine.stats import Metric
from ..log import tell
from . import engine_process
from .engine_process import (
    Abort,
    Add,
    Delta,
    Failed,
    GetMetrics,
    MetricsReply,
    Note,
    Ready,
    StepResult,
    Stop,
    ToEngine,
    WatchMemory,
    joined,
    receive,
    send,
)
from .errors import ApiError

LAST_STEP = 5.0  # seconds that the engine gets to exit by itself


class Process(Protocol):
    """The part of multiprocessing's process objects that EngineClient uses."""

    @property
    def exitcode(self) -> int | None: ...
    def is_alive(self) -> bool: ...
    def join(self, timeout: float | None = None) -> None: ...
    def kill(self) -> None: ...


def start_engine(args: EngineArgs, build: engine_process.Build) -> tuple[Connection, Process]:
    """Start a process that builds an engine with `build`. Return the pipe to it, and the process."""
    context = multiprocessing.get_context("spawn")
    pipe, engines_end = context.Pipe()
    process = context.Process(
        target=engine_process.run, args=(engines_end, args, build), name="nanovllm engine", daemon=True
    )
    process.start()
    Finalize(None, process.kill, exitpriority=0)  # otherwise Python would wait for the process at exit
    engines_end.close()  # otherwise the pipe would stay open after the engine exits
    return pipe, process


class EngineClient:
    """A client of the engine. Requests leave through an outbox; outputs arrive in a stream per request body.

    The server's limits use the counts. `error` is set once the engine has exited.
    """

    def __init__(self, pipe: Connection, process: Process) -> None:
        """Store the pipe and the process. Call ready() to wait for the engine."""
        self._pipe, self._process = pipe, process
        self._outbox: SimpleQueue[ToEngine | None] = SimpleQueue()
        self._streams: dict[str, RequestStream] = {}
        self._waiting: dict[str, int] = {}  # tokens of each prompt that has no output yet
        self.num_samples = 0  # of unfinished requests
        self.num_waiting_tokens = 0  # the sum of _waiting
        self._replies: dict[int, asyncio.Future[list[Metric]]] = {}
        self._numbers = itertools.count()
        self._is_closing = False
        self.error: EngineDeadError | None = None
        self.on_death: Callable[[], None] = lambda: None
        self.on_events: Callable[[list[dict[str, Any]]], None] = lambda events: None  # a step's events; see watch()

    async def ready(self) -> Ready:
        """Wait for the engine. Raise ValueError for an invalid option or checkpoint, else EngineDeadError."""
        loop = asyncio.get_running_loop()
        try:
            first = await asyncio.to_thread(receive, self._pipe)
        except (EOFError, OSError):
            first = Failed(self._exit_reason())
        if isinstance(first, Failed):
            raise ValueError(first.error) if first.is_mistake else EngineDeadError(first.error)
        assert isinstance(first, Ready), f"an engine begins with Ready, not {first}"
        loop.add_reader(self._pipe.fileno(), self._read)
        threading.Thread(target=self._write, name="to the engine", daemon=True).start()
        return first

    @property
    def num_requests(self) -> int:
        """The number of unfinished requests."""
        return len(self._streams)

    @property
    def num_waiting_requests(self) -> int:
        """The number of requests without an output yet."""
        return len(self._waiting)

    async def generate(self, requests: Sequence[Add]) -> AsyncGenerator[Delta, None]:
        """Yield the new parts of the requests until all of them have ended. Their ids must be unique.

        Leaving the loop early aborts them, which frees their blocks before the next step. Raise ValueError for an
        invalid request, ApiError for one that failed midway, and EngineDeadError if the engine has exited.
        """
        stream, unfinished = RequestStream(), {request.request_id for request in requests}
        num_samples = sum(request.params.n for request in requests)
        self.num_samples += num_samples
        try:
            for request in requests:
                self._send(request)
                self._streams[request.request_id] = stream
                self._waiting[request.request_id] = len(request.token_ids)
                self.num_waiting_tokens += len(request.token_ids)
            while unfinished:
                for delta in await stream.get():
                    if delta.finished:
                        unfinished.discard(delta.request_id)
                    if delta.error is not None:
                        raise ValueError(delta.error) if delta.is_refused else failure(delta.request_id, delta.error)
                    yield delta
        finally:
            self.num_samples -= num_samples
            for request in requests:
                self._streams.pop(request.request_id, None)
                self._stop_waiting(request.request_id)
            for request_id in unfinished:
                self._outbox.put(Abort(request_id))

    async def get_metrics(self) -> list[Metric]:
        """Return the engine's metrics between two steps. Raise EngineDeadError if it has exited."""
        number = next(self._numbers)
        self._replies[number] = asyncio.get_running_loop().create_future()
        try:
            self._send(GetMetrics(number))
            return await self._replies[number]
        finally:
            del self._replies[number]

    def watch(self, is_on: bool, show_text: bool) -> None:
        """Start or stop calling on_events() with the memory's events. Do nothing if the engine has exited."""
        self._outbox.put(WatchMemory(is_on, show_text))

    def cut(self, reason: str) -> None:
        """Cut off all requests. Each caller gets an ApiError with the reason."""
        for stream in set(self._streams.values()):
            stream.fail(ApiError(reason, status=503))

    async def close(self) -> None:
        """Stop the process, and kill it if it does not exit by itself."""
        self._is_closing = True
        if self._process.is_alive():
            self._outbox.put(Stop())
            await asyncio.to_thread(self._process.join, LAST_STEP)
        if self._process.is_alive():
            self._process.kill()
            await asyncio.to_thread(self._process.join)
        self._outbox.put(None)

    def _send(self, message: ToEngine) -> None:
        if self.error is not None:
            raise EngineDeadError(*self.error.args)
        self._outbox.put(message)

    def _stop_waiting(self, request_id: str) -> None:
        self.num_waiting_tokens -= self._waiting.pop(request_id, 0)

    def _write(self) -> None:
        """Send the messages in the outbox. This runs in its own thread, so a full pipe never blocks the event loop."""
        with suppress(OSError):  # _read() sees the end of the engine too
            while (message := self._outbox.get()) is not None:
                send(self._pipe, message)

    def _read(self) -> None:
        """Handle a message, or the end of the pipe."""
        try:
            message = receive(self._pipe)
        except (EOFError, OSError):
            self._die(self._exit_reason())
            return
        if isinstance(message, StepResult):
            self._deliver(message)
        elif isinstance(message, MetricsReply):
            if (reply := self._replies.get(message.number)) and not reply.done():
                reply.set_result(message.metrics)
        elif isinstance(message, Note):
            tell(message.text)
        elif isinstance(message, Failed):
            self._die(message.error)

    def _deliver(self, step: StepResult) -> None:
        for delta in step.deltas:
            self._stop_waiting(delta.request_id)
            if stream := self._streams.get(delta.request_id):  # otherwise its client has disconnected
                stream.put(delta)
        if step.events is not None:
            self.on_events(step.events)

    def _die(self, reason: str) -> None:
        """Raise EngineDeadError in all waiting callers."""
        asyncio.get_running_loop().remove_reader(self._pipe.fileno())
        if self.error is not None or self._is_closing:
            return
        self.error = EngineDeadError(f"the engine has ended: {reason}")
        for stream in set(self._streams.values()):
            stream.fail(EngineDeadError(*self.error.args))
        for reply in self._replies.values():
            if not reply.done():
                reply.set_exception(EngineDeadError(*self.error.args))
        self.on_death()

    def _exit_reason(self) -> str:
        self._process.join(1.0)
        status = self._process.exitcode
        return f"its process was ended by signal {-status}" if status and status < 0 else f"exit status {status}"


def failure(request_id: str, error: str) -> ApiError:
    """Print an error for the person who runs the server. Return it without an exception's text: it may name files."""
    tell(f"error: request {request_id}: {error}")
    kind, _, text = error.partition(": ")
    if kind == "ValueError":
        return ApiError(text, status=500)
    return ApiError(f"The request failed: {kind}." if kind.isidentifier() else error, status=500)


class RequestStream:
    """The unread deltas of one body's requests. A slow reader gets one merged delta per request."""

    def __init__(self) -> None:
        self._deltas: dict[str, Delta] = {}  # by request
        self._error: Exception | None = None
        self._reader: asyncio.Future[None] | None = None

    def put(self, delta: Delta) -> None:
        """Add a delta."""
        before = self._deltas.get(delta.request_id)
        self._deltas[delta.request_id] = delta if before is None else merged(before, delta)
        self._wake()

    def fail(self, error: Exception) -> None:
        """End with an error, which get() raises after the last delta."""
        self._error = error
        self._wake()

    async def get(self) -> list[Delta]:
        """Wait for deltas. Raise the error that the stream ended with."""
        while not self._deltas:
            if self._error is not None:
                raise self._error
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
        deltas, self._deltas = self._deltas, {}
        return list(deltas.values())

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)


def merged(first: Delta, second: Delta) -> Delta:
    """Return two deltas of a request as one."""
    pieces = {piece.sample: piece for piece in first.pieces}
    for piece in second.pieces:
        before = pieces.get(piece.sample)
        pieces[piece.sample] = piece if before is None else joined(before, piece)
    prompt_logprobs = first.prompt_logprobs or second.prompt_logprobs
    return second._replace(pieces=list(pieces.values()), prompt_logprobs=prompt_logprobs)
