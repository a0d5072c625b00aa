"""The engine's process: take what has come, make a step, say what came of it.

No other thread of Python runs beside it: each operation of a step would wait for the interpreter's lock.
"""

import os
import select
import signal
import sys
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from threading import Thread
from typing import Any

from ..engine.config import EngineArgs
from ..engine.llm_engine import LLMEngine
from ..engine.outputs import CompletionOutput, RequestOutput
from ..engine.stats import Metric
from ..trace import tracer
from .messages import Abort, Add, Answer, Ask, Delta, Failed, Note, Piece, Ready, Step, Stop, Watch, receive, send
from .step_times import StepTimes

Build = Callable[[EngineArgs], LLMEngine]


def run(pipe: Connection, args: EngineArgs, build: Build) -> None:
    """The process. The front alone ends it: what a terminal sends to both is not for the engine."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    Thread(target=end_with_the_front, args=(pipe.fileno(),), daemon=True).start()
    status = serve(pipe, args, build)
    sys.stderr.flush()
    os._exit(status)  # nothing is left to put in order, and libraries take a second for theirs


def serve(pipe: Connection, args: EngineArgs, build: Build) -> int:
    """Make the engine, and move it until it is told to stop. Returns an exit status."""
    try:
        engine = build(args)
    except (OSError, ValueError) as error:
        send(pipe, Failed(str(error), is_mistake=True))
        return 2
    try:
        send(pipe, Ready(engine.max_model_len, engine.model_config.vocab_size, engine.kernels.says))
        Worker(pipe, engine).work()
    except (EOFError, ConnectionError):  # the front has gone: nobody is left to tell
        return 1
    except Exception as error:  # the engine's state is not known: it ends, and says why
        traceback.print_exc()
        send(pipe, Failed(f"{type(error).__name__}: {error}"))
        return 1
    finally:
        engine.kernels.close()
    return 0


def end_with_the_front(descriptor: int) -> None:
    """Wait, without the interpreter's lock, until nobody is at the other end of the pipe; then end at once."""
    hung_up = select.poll()
    hung_up.register(descriptor, 0)  # no reading, no writing: a hang-up is told all the same
    hung_up.poll()
    os._exit(1)


class Worker:
    """Moves an engine by what comes through a pipe."""

    def __init__(self, pipe: Connection, engine: LLMEngine) -> None:
        self.engine = engine
        self._pipe = pipe
        self._news = select.poll()
        self._news.register(pipe.fileno(), select.POLLIN)
        self._is_over = False
        self._watch = tracer.Watch(engine)
        self._step_times = StepTimes()
        engine.observers.append(self._step_times)
        self._answers: dict[str, Callable[[], Any]] = {"stats": engine.stats, "metrics": self.metrics}
        self._held: list[Add] = []  # until nobody runs
        self._refused: list[Delta] = []  # requests that were not taken, until the next message says so
        self._handlers: dict[type, Callable[[Any], None]] = {
            Add: self.add,
            Abort: self.abort,
            Ask: self.answer,
            Watch: self.watch,
            Stop: self.stop,
        }

    def work(self) -> None:
        """Until it is told to stop. It waits for messages only if there is nothing to compute."""
        while not self._is_over:
            while self._news.poll(0) or not self.has_work:
                message = receive(self._pipe)
                self._handlers[type(message)](message)
                if self._is_over:
                    return
            self.step()

    @property
    def has_work(self) -> bool:
        return self.engine.has_unfinished_requests() or bool(self._refused or self._held) or self._watch.has_events

    def step(self) -> None:
        if self._held and not self.engine.has_unfinished_requests():
            held, self._held = self._held, []
            for message in held:
                self.add(message)
        outputs = self.engine.step() if self.engine.has_unfinished_requests() else []
        deltas = [*self._refused, *map(delta_of, outputs)]
        self._refused = []
        events = self._watch.take()
        if deltas or events:
            send(self._pipe, Step(deltas, events))

    def add(self, message: Add) -> None:
        """A request that cannot be served is told with the next step.

        Once kernels have been compiled, those that run are let end first, or a busy server would never take them up.
        """
        awaits_idle = self.engine.kernels.awaits_idle
        if awaits_idle and self.engine.has_unfinished_requests():
            self._held.append(message)
            return
        try:
            self.engine.add_request(message.request_id, message.token_ids, message.params, prompt_text=message.prompt)
        except ValueError as error:
            self._refused.append(Delta(message.request_id, [], True, 0, error=str(error), is_refused=True))
        except BaseException as error:  # not foreseen, or a panic in Rust: it is this request's, and nobody else's
            self.engine.abort_request(message.request_id)
            self._refused.append(Delta(message.request_id, [], True, 0, error=f"{type(error).__name__}: {error}"))
        if awaits_idle:
            send(self._pipe, Note(self.engine.kernels.says))

    def abort(self, message: Abort) -> None:
        """Nobody waits for its outputs any more."""
        self._held = [each for each in self._held if each.request_id != message.request_id]
        self.engine.abort_request(message.request_id)

    def answer(self, message: Ask) -> None:
        send(self._pipe, Answer(message.number, self._answers[message.name]()))

    def metrics(self) -> list[Metric]:
        """Return the engine's metrics, and those that only a server measures."""
        numbers = self.engine.get_metrics()
        return [*numbers, *self._step_times.histograms(numbers[0].labels)]

    def watch(self, message: Watch) -> None:
        if message.is_on:
            self._watch.on(message.show_text)
        else:
            self._watch.off()

    def stop(self, message: Stop) -> None:
        self._is_over = True


def delta_of(output: RequestOutput) -> Delta:
    """Of an output that holds what is new."""
    pieces = [piece_of(each) for each in output.outputs]
    cached, told = output.num_cached_tokens, output.prompt_logprobs
    return Delta(output.request_id, pieces, output.finished, cached, told, output.error)


def piece_of(output: CompletionOutput) -> Piece:
    new = output.text, output.token_ids, output.logprobs
    return Piece(output.index, *new, output.finish_reason, output.stop_reason)
