"""EngineClient: the front's side of the engine's process. It belongs to one event loop."""

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
from ..log import tell
from . import engine_process
from .errors import RequestFailed
from .messages import Abort, Add, Answer, Ask, Delta, Failed, Note, Ready, Step, Stop, Watch, receive, send
from .request_stream import RequestStream

LAST_STEP = 5.0  # seconds that an engine has to end in order


class Process(Protocol):
    """As multiprocessing has it."""

    @property
    def exitcode(self) -> int | None: ...
    def is_alive(self) -> bool: ...
    def join(self, timeout: float | None = None) -> None: ...
    def kill(self) -> None: ...


def start_engine(args: EngineArgs, build: engine_process.Build) -> tuple[Connection, Process]:
    """A process that makes an engine by `build`, and the pipe to it."""
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    process = context.Process(
        target=engine_process.run, args=(theirs, args, build), name="nanovllm engine", daemon=True
    )
    process.start()
    Finalize(None, process.kill, exitpriority=0)  # if nobody closes it: at its end Python waits for a process
    theirs.close()  # or a dead engine would not close the pipe
    return pipe, process


class EngineClient:
    def __init__(self, pipe: Connection, process: Process) -> None:
        """ready() waits for the engine."""
        self._pipe, self._process = pipe, process
        self._outbox: SimpleQueue[Any] = SimpleQueue()
        self._streams: dict[str, RequestStream] = {}
        self._waiting: dict[str, int] = {}  # tokens of the prompts of which the engine has said nothing yet
        self.num_samples = 0  # of requests that have not ended
        self.num_waiting_tokens = 0  # their sum
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self._numbers = itertools.count()
        self._is_closing = False
        self.error: EngineDeadError | None = None  # why there is no engine any more
        self.on_death: Callable[[], None] = lambda: None
        self.on_events: Callable[[list[dict[str, Any]]], None] = lambda events: None  # of a step, while it is watched

    async def ready(self) -> Ready:
        """Wait for the engine. Raises ValueError for a mistake of the caller, else EngineDeadError."""
        loop = asyncio.get_running_loop()
        try:
            first = await asyncio.to_thread(receive, self._pipe)
        except (EOFError, OSError):
            first = Failed(self._how_it_ended())
        if isinstance(first, Failed):
            raise ValueError(first.error) if first.is_mistake else EngineDeadError(first.error)
        loop.add_reader(self._pipe.fileno(), self._read)
        threading.Thread(target=self._write, name="to the engine", daemon=True).start()
        return first

    @property
    def num_requests(self) -> int:
        """Requests that have not ended."""
        return len(self._streams)

    @property
    def num_waiting_requests(self) -> int:
        """Requests of which the engine has said nothing yet."""
        return len(self._waiting)

    async def generate(self, requests: Sequence[Add]) -> AsyncGenerator[Delta, None]:
        """Yield what is new of the requests, whose names nobody else has, until all of them have ended.

        To leave it early aborts them: their blocks come free before the next step. Raises ValueError for a request that
        cannot be served, RequestFailed for one that broke off, and EngineDeadError if there is no engine any more.
        """
        stream, unfinished = RequestStream(), {request.request_id for request in requests}
        num_samples = sum(request.params.n for request in requests)
        self.num_samples += num_samples
        try:
            for request in requests:
                self.send(request)
                self._streams[request.request_id] = stream
                self._note_waiting(request)
            while unfinished:
                for delta in await stream.get():
                    if delta.finished:
                        unfinished.discard(delta.request_id)
                    if delta.error is not None:
                        raise ValueError(delta.error) if delta.is_refused else failure(delta)
                    yield delta
        finally:
            self.num_samples -= num_samples
            for request in requests:
                self._streams.pop(request.request_id, None)
                self._note_begun(request.request_id)
            for request_id in unfinished:
                self._outbox.put(Abort(request_id))

    async def ask(self, name: str) -> Any:
        """What the engine says between two steps: "stats", "metrics". Raises EngineDeadError."""
        number = next(self._numbers)
        self._answers[number] = asyncio.get_running_loop().create_future()
        try:
            self.send(Ask(number, name))
            return await self._answers[number]
        finally:
            del self._answers[number]

    def watch(self, is_on: bool, show_text: bool) -> None:
        """Have on_events() called with what happens to the memory, or no more. A dead engine has nothing to tell."""
        self._outbox.put(Watch(is_on, show_text))

    def cut(self, why: str) -> None:
        """End all requests: each caller gets a RequestFailed that says why."""
        for stream in set(self._streams.values()):
            stream.fail(RequestFailed(why, status=503))

    async def close(self) -> None:
        """End the process: in order if it can, else by force."""
        self._is_closing = True
        if self._process.is_alive():
            self._outbox.put(Stop())
            await asyncio.to_thread(self._process.join, LAST_STEP)
        if self._process.is_alive():
            self._process.kill()
            await asyncio.to_thread(self._process.join)
        self._outbox.put(None)

    def send(self, message: Any) -> None:
        if self.error is not None:
            raise EngineDeadError(*self.error.args)
        self._outbox.put(message)

    def _note_waiting(self, request: Add) -> None:
        self._waiting[request.request_id] = len(request.token_ids)
        self.num_waiting_tokens += len(request.token_ids)

    def _note_begun(self, request_id: str) -> None:
        self.num_waiting_tokens -= self._waiting.pop(request_id, 0)

    def _write(self) -> None:
        """In a thread of its own: a full pipe never keeps the event loop waiting."""
        with suppress(OSError):  # the reader sees the same end
            while (message := self._outbox.get()) is not None:
                send(self._pipe, message)

    def _read(self) -> None:
        """A message has come, or the end."""
        try:
            message = receive(self._pipe)
        except (EOFError, OSError):
            self._die(self._how_it_ended())
            return
        if isinstance(message, Step):
            self._deliver(message)
        elif isinstance(message, Answer):
            if (answer := self._answers.get(message.number)) and not answer.done():
                answer.set_result(message.value)
        elif isinstance(message, Note):
            tell(message.text)
        elif isinstance(message, Failed):
            self._die(message.error)

    def _deliver(self, step: Step) -> None:
        for delta in step.deltas:
            self._note_begun(delta.request_id)
            if stream := self._streams.get(delta.request_id):  # else nobody waits for it any more
                stream.put(delta)
        if step.events is not None:
            self.on_events(step.events)

    def _die(self, why: str) -> None:
        """Everybody who waits gets an error."""
        asyncio.get_running_loop().remove_reader(self._pipe.fileno())
        if self.error is not None or self._is_closing:
            return
        self.error = EngineDeadError(f"the engine has ended: {why}")
        for stream in set(self._streams.values()):
            stream.fail(EngineDeadError(*self.error.args))
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(EngineDeadError(*self.error.args))
        self.on_death()

    def _how_it_ended(self) -> str:
        self._process.join(1.0)
        status = self._process.exitcode
        return f"its process was ended by signal {-status}" if status and status < 0 else f"exit status {status}"


def failure(delta: Delta) -> RequestFailed:
    """Whoever runs the server is told all, the client no exception's own text: it may name files."""
    tell(f"error: request {delta.request_id}: {delta.error}")
    kind, _, text = delta.error.partition(": ")
    if kind == "ValueError":
        return RequestFailed(text)
    return RequestFailed(f"the request failed: {kind}" if kind.isidentifier() else delta.error)
