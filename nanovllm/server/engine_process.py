"""The engine's process, and the messages between it and the API server.

    to the engine      Add, Abort, GetMetrics, WatchMemory, Stop
    from the engine    Ready first, then StepResult, MetricsReply and Note; if the engine fails, Failed comes last

The process repeats three things: handle the messages that have arrived, run a step, and send its outputs. No other
Python thread does any work here, because each operation of a step would then wait for the interpreter's lock.
"""

import os
import pickle
import select
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from ctypes import c_double
from multiprocessing.connection import Connection
from threading import Thread
from typing import Any, NamedTuple

from ..distributed.followers import exit_when_closed
from ..distributed.rank_group import RankError
from ..engine.executor import Scheduled
from ..engine.interrupts import interrupts_held_back
from ..engine.sequence import Sequence as EngineSequence
from ..llm_engine import LLMEngine
from ..log import logger
from ..metrics import PER_TOKEN, STEP_TOKENS, Histogram, Metric, Observations
from ..options.engine_args import EngineArgs
from ..progress import no_progress_due, note_progress, share_progress
from ..requests.outputs import CompletionOutput, RequestOutput
from ..requests.pooling_params import PoolingParams
from ..requests.prompts import TokensPrompt
from ..requests.sampling_params import SamplingParams
from ..requests.tokens import Logprob
from ..trace import tracer
from . import collector

MAX_MESSAGE_BYTES = 1 << 17  # between two steps, roughly; running requests wait while messages are handled
RANK_CHECK_MILLISECONDS = 1000  # how often an idle engine checks that its other ranks are alive
Build = Callable[[EngineArgs], LLMEngine]


# Messages: tuples, which pickle quickly


class Add(NamedTuple):
    """A new request."""

    request_id: str
    token_ids: list[int]
    params: SamplingParams
    prompt: str | None  # the text of the tokens, if the server knows it
    pooling_params: PoolingParams | None = None  # set if the request is for an embedding
    cache_salt: str | None = None


class Abort(NamedTuple):
    """The cancellation of a request whose client has hung up."""

    request_id: str


class GetMetrics(NamedTuple):
    """A request for the engine's metrics, which are read between two steps."""


class WatchMemory(NamedTuple):
    """A request to start or stop sending memory events. After a start, the first event is a snapshot."""

    is_on: bool
    show_text: bool


class Stop(NamedTuple):
    """A request to end the process."""


class Ready(NamedTuple):
    """The engine's first message, once it can serve."""

    max_model_len: int
    kernels: str  # a description of the engine's kernels


class Failed(NamedTuple):
    """The engine's last message, if it fails. `error` is one line for the operator."""

    error: str
    is_mistake: bool = False  # of the user: an invalid option, or a checkpoint that cannot be read


class Piece(NamedTuple):
    """The new part of one sample's output."""

    sample: int  # the sample's index within the request
    text: str
    token_ids: list[int]
    logprobs: Sequence[dict[int, Logprob]] | None
    finish_reason: str | None
    stop_reason: str | int | None


class Delta(NamedTuple):
    """The new part of a request's output."""

    request_id: str
    pieces: list[Piece]
    finished: bool
    num_cached_tokens: int  # tokens of the prompt that were in the prefix cache
    prompt_logprobs: Sequence[dict[int, Logprob] | None] | None = None
    error: str | None = None
    is_refused: bool = False  # the request is invalid, so the engine never accepted it
    embedding: list[float] | None = None


class TextDeltas(NamedTuple):
    """The outputs of a step that are only text, in columns: lists pickle faster than objects. See is_text()."""

    request_ids: list[str]
    texts: list[str]
    token_ids: list[list[int]]
    num_cached_tokens: list[int]

    def add(self, output: RequestOutput) -> None:
        """Add an output."""
        self.request_ids.append(output.request_id)
        self.texts.append(output.outputs[0].text)
        self.token_ids.append(output.outputs[0].token_ids)
        self.num_cached_tokens.append(output.num_cached_tokens)

    def rows(self) -> Iterator[Delta]:
        """Yield a delta for each request."""
        for request_id, text, token_ids, num_cached_tokens in zip(*self, strict=True):
            yield Delta(request_id, [Piece(0, text, token_ids, None, None, None)], False, num_cached_tokens)


class StepResult(NamedTuple):
    """The results of a step: most of them are in `texts`, and all others in `deltas`."""

    texts: TextDeltas
    deltas: list[Delta]
    events: list[dict[str, Any]] | None = None  # memory events (trace/EVENTS.md), if watched


class Note(NamedTuple):
    """A line to log for the operator."""

    text: str


class MetricsReply(NamedTuple):
    """The reply to a GetMetrics. Replies are sent in the order of the requests."""

    metrics: list[Metric]


ToEngine = Add | Abort | GetMetrics | WatchMemory | Stop
FromEngine = Ready | Failed | StepResult | Note | MetricsReply


def send(pipe: Connection, message: ToEngine | FromEngine) -> None:
    """Send a message. Raise OSError if the other end is closed."""
    pipe.send_bytes(pickle.dumps(message, pickle.HIGHEST_PROTOCOL))


def receive(pipe: Connection) -> Any:
    """Wait for a message. Raise EOFError or OSError if the other end is closed."""
    return pickle.loads(pipe.recv_bytes())


def join_pieces(first: Piece, second: Piece) -> Piece:
    """Join two consecutive pieces of a sample.

    >>> join_pieces(Piece(0, "a", [1], None, None, None), Piece(0, "b", [2], None, "stop", None))
    Piece(sample=0, text='ab', token_ids=[1, 2], logprobs=None, finish_reason='stop', stop_reason=None)
    """
    logprobs = None if second.logprobs is None else [*(first.logprobs or []), *second.logprobs]
    text, token_ids = first.text + second.text, [*first.token_ids, *second.token_ids]
    return second._replace(text=text, token_ids=token_ids, logprobs=logprobs)


# The process


def run(pipe: Connection, args: EngineArgs, build: Build, log_level: int, progress: c_double) -> None:
    """Run the engine's process until Stop, or until the API server exits. Report progress in memory that both share."""
    share_progress(progress)
    logger.setLevel(log_level)
    Thread(target=exit_when_closed, args=(pipe.fileno(),), daemon=True).start()

    def build_and_hold_back(args: EngineArgs) -> LLMEngine:
        engine = build(args)
        collector.hold_back()
        return engine

    status = serve(pipe, args, build_and_hold_back)
    sys.stderr.flush()
    os._exit(status)  # skip the cleanup of libraries, which takes a second and isn't needed


def serve(pipe: Connection, args: EngineArgs, build: Build) -> int:
    """Build the engine, and run it until Stop or an error. Return the exit status."""
    try:
        args.check_single_process()
        engine = build(args)
    except (OSError, ValueError) as error:
        send(pipe, Failed(str(error), is_mistake=True))
        return 2
    try:
        send(pipe, Ready(engine.max_model_len, engine.kernels.description))
        Worker(pipe, engine).work()
    except (EOFError, ConnectionError):  # the API server has exited
        return 1
    except RankError as error:
        send(pipe, Failed(str(error)))
        return 1
    except Exception as error:  # the engine is in an unknown state
        traceback.print_exc()
        send(pipe, Failed(f"{type(error).__name__}: {error}"))
        return 1
    finally:
        engine.kernels.close()
        engine.ranks.close()
    return 0


class Worker:
    """The loop of the engine's process."""

    def __init__(self, pipe: Connection, engine: LLMEngine) -> None:
        self.engine, self._pipe = engine, pipe
        self._poller = select.poll()
        self._poller.register(pipe.fileno(), select.POLLIN)
        self._watch, self._step_times = tracer.Watch(engine), StepTimes()
        engine.observers.append(self._step_times)
        self._held: list[Add] = []  # requests that wait until no other request is running
        self._refused: list[Delta] = []  # errors of refused requests, sent in the next StepResult

    @interrupts_held_back()  # once, instead of in each step: signals are blocked anyway
    def work(self) -> None:
        """Handle messages and run steps until Stop. Wait for a message only if there is nothing to compute."""
        while True:
            num_bytes = 0  # of messages handled before this step
            if not self.has_work:
                collector.catch_up()
            while not self.has_work or (num_bytes < MAX_MESSAGE_BYTES and self._poller.poll(0)):
                with no_progress_due():
                    while self.engine.ranks.world_size > 1 and not self._poller.poll(RANK_CHECK_MILLISECONDS):
                        self.engine.ranks.check()
                    received = self._pipe.recv_bytes()
                num_bytes += len(received)
                message = pickle.loads(received)
                if isinstance(message, Stop):
                    return
                self.handle(message)
                note_progress()
            self.step()
            note_progress()

    def handle(self, message: Add | Abort | GetMetrics | WatchMemory) -> None:
        """Handle a message between two steps."""
        match message:
            case Add():
                self.add(message)
            case Abort(request_id):
                self._held = [each for each in self._held if each.request_id != request_id]
                self.engine.abort_request(request_id)
            case GetMetrics():
                metrics = self.engine.get_metrics()
                metrics += self._step_times.histograms(metrics[0].labels)  # only a server measures these
                send(self._pipe, MetricsReply(metrics))
            case WatchMemory(is_on, show_text):
                self._watch.on(show_text) if is_on else self._watch.off()

    @property
    def has_work(self) -> bool:
        return self.engine.has_unfinished_requests() or bool(self._refused or self._held) or self._watch.has_events

    def step(self) -> None:
        """Run a step and send its outputs."""
        if self._held and not self.engine.has_unfinished_requests():
            held, self._held = self._held, []
            for message in held:
                self.add(message)
        outputs = self.engine.step() if self.engine.has_unfinished_requests() else []
        texts, deltas = TextDeltas([], [], [], []), self._refused
        self._refused = []
        for output in outputs:
            if is_text(output):
                texts.add(output)
            else:
                deltas.append(delta_of(output))
        events = self._watch.take()
        if outputs or deltas or events:
            send(self._pipe, StepResult(texts, deltas, events))

    def add(self, message: Add) -> None:
        """Add a request to the engine. If the engine refuses it, the next StepResult says so.

        Once compiled kernels are ready, hold new requests until the running ones have finished: the engine switches to
        those kernels only when it is idle, which a busy server never is.
        """
        awaits_idle = self.engine.kernels.awaits_idle
        if awaits_idle and self.engine.has_unfinished_requests():
            self._held.append(message)
            return
        try:
            params = message.params if message.pooling_params is None else message.pooling_params
            prompt = TokensPrompt(prompt_token_ids=message.token_ids)
            if message.cache_salt:
                prompt["cache_salt"] = message.cache_salt
            self.engine.add_request(message.request_id, prompt, params, prompt_text=message.prompt)
        except ValueError as error:
            self._refused.append(Delta(message.request_id, [], True, 0, error=str(error), is_refused=True))
        except BaseException as error:  # unexpected, or a panic in Rust: other requests must survive it
            self.engine.abort_request(message.request_id)
            self._refused.append(Delta(message.request_id, [], True, 0, error=f"{type(error).__name__}: {error}"))
        if awaits_idle:
            send(self._pipe, Note(self.engine.kernels.description))


def is_text(output: RequestOutput) -> bool:
    """Return whether an output is only text and tokens of a request that goes on, and of its first sample alone."""
    new = output.outputs
    is_alone = len(new) == 1 and new[0].index == 0 and new[0].finish_reason is None
    is_last = output.finished or output.embedding is not None
    return is_alone and not is_last and new[0].logprobs is None and output.prompt_logprobs is None


def delta_of(output: RequestOutput) -> Delta:
    """Convert an output, whose samples hold only what is new, to a message."""
    pieces = [piece_of(each) for each in output.outputs]
    about_prompt = output.num_cached_tokens, output.prompt_logprobs
    return Delta(output.request_id, pieces, output.finished, *about_prompt, output.error, embedding=output.embedding)


def piece_of(output: CompletionOutput) -> Piece:
    new_tokens = output.text, output.token_ids, output.logprobs
    return Piece(output.index, *new_tokens, output.finish_reason, output.stop_reason)


class StepTimes:
    """An observer that measures the number of tokens in each step, and the time between a sample's tokens."""

    def __init__(self) -> None:
        self._step_tokens, self._token_gaps = Observations(STEP_TOKENS), Observations(PER_TOKEN)
        self._last_token_times: dict[EngineSequence, float] = {}  # of unfinished sequences

    def on_step(self, batch: list[Scheduled], updated: list[EngineSequence]) -> None:
        """Count the step's tokens, and measure the time since the previous token of each updated sequence."""
        if batch:
            self._step_tokens.add(sum(num_tokens for _, num_tokens in batch))
        now = time.perf_counter()
        for seq in updated:
            if seq in self._last_token_times and not seq.error:
                self._token_gaps.add(now - self._last_token_times[seq])
            self._last_token_times[seq] = now

    def on_finish(self, seq: EngineSequence) -> None:
        """Forget a sequence that has ended."""
        self._last_token_times.pop(seq, None)

    def histograms(self, labels: dict[str, str]) -> list[Histogram]:
        """Return both measurements as histograms with vLLM's names."""
        return [
            self._step_tokens.histogram("vllm:iteration_tokens_total", labels.copy()),
            self._token_gaps.histogram("vllm:inter_token_latency_seconds", labels.copy()),
        ]
