"""EngineClient: the API server's end of the pipe to the engine process. Use a client in one event loop only."""

import asyncio
import math
import multiprocessing
import signal
import threading
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import suppress
from ctypes import c_double
from dataclasses import dataclass, field
from itertools import chain
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from multiprocessing.util import Finalize
from queue import SimpleQueue
from typing import Any

from ..async_llm import EngineDeadError
from ..log import logger
from ..metrics import Metric
from ..options.engine_args import EngineArgs
from . import collector, engine_process
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
    join_pieces,
    receive,
    send,
)
from .errors import ApiError

Write = Callable[[Delta], bool]  # writes a delta to a client's connection, or returns False if it must wait
EXIT_SECONDS = 5.0  # time for the engine to exit before it is killed


def start_engine(args: EngineArgs, build: engine_process.Build) -> tuple[Connection, BaseProcess, c_double]:
    """Start a process that builds an engine with `build`. Return a pipe to it, the process, and its progress.

    Only the API server stops the engine. Ctrl-C in a terminal signals both processes, so the engine's process blocks
    signals from its start. The progress is the time at which the engine last made any, in shared memory (see
    ../progress.py).
    """
    context = multiprocessing.get_context("spawn")
    pipe, engine_pipe = context.Pipe()
    progress: c_double = context.RawValue(c_double, math.inf)
    process = context.Process(
        target=engine_process.run,
        args=(engine_pipe, args, build, logger.level, progress),
        name="nanovllm engine",
        daemon=True,
    )
    resource_tracker.ensure_running()  # otherwise, process.start() would start the tracker, which unblocks signals
    previous_mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    process.start()
    signal.pthread_sigmask(signal.SIG_SETMASK, previous_mask)
    Finalize(None, process.kill, exitpriority=0)  # otherwise Python would wait for the process at exit
    engine_pipe.close()  # otherwise the pipe would stay open after the engine exits
    return pipe, process, progress


@dataclass
class RunningRequests:
    """The unfinished requests of one body, and what has arrived of them and was not taken yet."""

    num_samples: int
    num_waiting_tokens: dict[str, int]  # prompt tokens of each request that has no output yet
    write: Write
    _is_waiting: bool = False  # in get()
    _deltas: dict[str, Delta] = field(default_factory=dict)  # one per request
    _error: Exception | None = None
    _arrived: asyncio.Event = field(default_factory=asyncio.Event)

    def put(self, delta: Delta) -> None:
        """Write a delta to the client if all earlier ones were sent. Otherwise, merge it with what has arrived."""
        self.num_waiting_tokens.pop(delta.request_id, None)
        try:
            if self._is_waiting and not (self._arrived.is_set() or delta.finished or delta.error) and self.write(delta):
                return
        except Exception as error:  # it must not keep other requests from their deltas
            self.fail(error)
            return
        earlier = self._deltas.get(delta.request_id)
        self._deltas[delta.request_id] = delta if earlier is None else merge_deltas(earlier, delta)
        self._arrived.set()

    def fail(self, error: Exception) -> None:
        """End the requests with an error. Only the first one counts."""
        self._error = self._error or error
        self._arrived.set()

    async def get(self) -> list[Delta]:
        """Wait for deltas, and return those that have arrived. If there are none but an error, raise it."""
        self._is_waiting = True
        await self._arrived.wait()
        self._is_waiting = False
        deltas, self._deltas = list(self._deltas.values()), {}
        if self._error is None:
            self._arrived.clear()
        elif not deltas:
            raise self._error
        return deltas


class EngineClient:
    """A client of the engine. Requests leave through an outbox; outputs arrive per request body.

    The server's limits use num_samples and num_waiting_tokens. `error` is set once the engine has exited.
    """

    def __init__(
        self,
        pipe: Connection,
        process: BaseProcess,
        progress: c_double | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Store the results of start_engine(), and the clock of `progress`. Call ready() to wait for the engine."""
        self._pipe, self._process, self._clock = pipe, process, clock
        self._progress = c_double(math.inf) if progress is None else progress
        self._outbox: SimpleQueue[ToEngine | None] = SimpleQueue()
        self.running: dict[str, RunningRequests] = {}  # by request id
        self._replies: deque[asyncio.Future[list[Metric]]] = deque()  # of get_metrics(), in the order of the calls
        self._is_closing = False
        self.error: EngineDeadError | None = None
        self.on_death: Callable[[], None] = lambda: None
        self.on_events: Callable[[list[dict[str, Any]]], None] = lambda events: None  # a step's events; see watch()

    async def ready(self) -> Ready:
        """Wait for the engine. If it fails, raise ValueError for a mistake of the user, else EngineDeadError."""
        loop = asyncio.get_running_loop()
        try:
            message = await asyncio.to_thread(receive, self._pipe)
        except (EOFError, OSError):
            message = Failed(self._exit_reason())
        if isinstance(message, Failed):
            raise ValueError(message.error) if message.is_mistake else EngineDeadError(message.error)
        assert isinstance(message, Ready), f"the engine's first message must be Ready, got {message}"
        loop.add_reader(self._pipe.fileno(), self._read)
        threading.Thread(target=self._write, name="to the engine", daemon=True).start()
        return message

    @property
    def num_requests(self) -> int:
        """The number of unfinished requests."""
        return len(self.running)

    @property
    def num_samples(self) -> int:
        """The number of samples of unfinished requests."""
        return sum(each.num_samples for each in self._bodies())

    @property
    def num_waiting_tokens(self) -> int:
        """The number of tokens in prompts that have no output yet."""
        return sum(sum(each.num_waiting_tokens.values()) for each in self._bodies())

    @property
    def stalled_seconds(self) -> float:
        """The number of seconds for which the engine has had work without making progress."""
        return max(0.0, self._clock() - self._progress.value)

    async def generate(self, requests: Sequence[Add], write: Write = lambda _: False) -> AsyncGenerator[Delta, None]:
        """Yield deltas of the requests until all of them have finished. Request ids must be unique.

        While the caller waits for the next delta, `write` is called with each one that isn't the last of its request
        and has no error. If it returns True, it has handled the delta, which isn't yielded.

        Leaving the loop early aborts the requests and frees their blocks before the next step. Raise ValueError for an
        invalid request, ApiError for one that failed or was cut off, and EngineDeadError if the engine has ended.
        """
        unfinished = {request.request_id: len(request.token_ids) for request in requests}  # prompt tokens, by id
        running = RunningRequests(sum(request.params.n for request in requests), unfinished.copy(), write)
        try:
            for request in requests:
                self._send(request)
                self.running[request.request_id] = running
            while unfinished:
                for delta in await running.get():
                    if delta.finished:
                        del unfinished[delta.request_id]
                    if delta.error is not None:
                        raise ValueError(delta.error) if delta.is_refused else failure(delta.request_id, delta.error)
                    yield delta
        finally:
            for request in requests:
                self.running.pop(request.request_id, None)
            if not self.running:
                collector.catch_up()
            for request_id in unfinished:
                self._outbox.put(Abort(request_id))

    async def get_metrics(self) -> list[Metric]:
        """Return the engine's metrics, read between two steps. Raise EngineDeadError if it has exited."""
        self._send(GetMetrics())
        self._replies.append(asyncio.get_running_loop().create_future())
        return await self._replies[-1]

    def watch(self, is_on: bool, show_text: bool) -> None:
        """Start or stop the calls of on_events() with memory events. Do nothing if the engine has exited."""
        self._outbox.put(WatchMemory(is_on, show_text))

    def cut(self, reason: str) -> None:
        """End all requests and all pending calls of get_metrics() with an ApiError whose message is `reason`."""
        for running in self._bodies():
            running.fail(ApiError(reason, status=503))
        for reply in self._replies:
            if not reply.done():
                reply.set_exception(ApiError(reason, status=503))

    def kill(self) -> None:
        """Kill the process immediately."""
        self._is_closing = True
        self._process.kill()

    async def close(self) -> None:
        """Ask the process to exit, and kill it if it doesn't."""
        self._is_closing = True
        if self._process.is_alive():
            self._outbox.put(Stop())
            await asyncio.to_thread(self._process.join, EXIT_SECONDS)
        if self._process.is_alive():
            self._process.kill()
            await asyncio.to_thread(self._process.join)
        self._outbox.put(None)
        asyncio.get_running_loop().remove_reader(self._pipe.fileno())

    def _bodies(self) -> list[RunningRequests]:
        return [*{id(each): each for each in self.running.values()}.values()]

    def _send(self, message: ToEngine) -> None:
        if self.error is not None:
            raise EngineDeadError(*self.error.args)
        self._outbox.put(message)

    def _write(self) -> None:
        """Send the messages in the outbox. This runs in its own thread, so a full pipe never blocks the event loop."""
        with suppress(OSError):  # _read() notices that the engine has exited
            while (message := self._outbox.get()) is not None:
                send(self._pipe, message)

    def _read(self) -> None:
        """Handle a message from the engine, or the end of the pipe."""
        try:
            message = receive(self._pipe)
        except (EOFError, OSError):
            message = Failed(self._exit_reason())
        match message:
            case StepResult(texts, deltas, events):
                for delta in chain(texts.rows(), deltas):
                    if running := self.running.get(delta.request_id):  # otherwise its client has disconnected
                        running.put(delta)
                if events is not None:
                    self.on_events(events)
            case MetricsReply(metrics):
                if not (reply := self._replies.popleft()).done():
                    reply.set_result(metrics)
            case Note(text):
                logger.info(text)
            case Failed(error):
                self._die(error)

    def _die(self, reason: str) -> None:
        """Raise EngineDeadError in all waiting callers, and call on_death()."""
        asyncio.get_running_loop().remove_reader(self._pipe.fileno())
        if self._is_closing:
            return
        self.error = EngineDeadError(f"the engine has ended: {reason}")
        for running in self._bodies():
            running.fail(EngineDeadError(*self.error.args))
        for reply in self._replies:
            if not reply.done():
                reply.set_exception(EngineDeadError(*self.error.args))
        self.on_death()

    def _exit_reason(self) -> str:
        self._process.join(1.0)
        status = self._process.exitcode
        return f"its process was ended by signal {-status}" if status and status < 0 else f"exit status {status}"


def failure(request_id: str, error: str) -> Exception:
    """Log a request's error for the operator, and return an exception for the client.

    If `error` begins with an exception's name, the client sees only that name, because the rest may name files. A
    ValueError keeps its text, because it is the client's fault: the request's constraints allow no token.
    """
    logger.error(f"error: request {request_id}: {error}")
    kind, _, text = error.partition(": ")
    if kind == "ValueError":
        return ValueError(text)
    return ApiError(f"The request failed: {kind}." if kind.isidentifier() else error, status=500)


def merge_deltas(first: Delta, second: Delta) -> Delta:
    """Merge two consecutive deltas of a request."""
    pieces = {piece.sample: piece for piece in first.pieces}
    for piece in second.pieces:
        earlier = pieces.get(piece.sample)
        pieces[piece.sample] = piece if earlier is None else join_pieces(earlier, piece)
    prompt_logprobs = first.prompt_logprobs or second.prompt_logprobs
    return second._replace(pieces=list(pieces.values()), prompt_logprobs=prompt_logprobs)
