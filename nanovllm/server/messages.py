"""What goes through the pipe between the front and the engine: tuples of values that pickle quickly.

to the engine    Add, Abort, Ask, Watch, Stop
from it          Ready or Failed, once; then Step, at most one for each step; Answer for each Ask; Note
"""

import pickle
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from ..engine.outputs import Logprob
from ..engine.sampling_params import SamplingParams


class Add(NamedTuple):
    request_id: str
    token_ids: list[int]
    params: SamplingParams
    prompt: str | None  # the text of the tokens, if there is one


class Abort(NamedTuple):
    request_id: str


class Ask(NamedTuple):
    number: int  # its answer has the same
    name: str  # "stats" or "metrics"


class Watch(NamedTuple):
    """Tell what happens to the memory, a snapshot first, from now on or no more."""

    is_on: bool
    show_text: bool


class Stop(NamedTuple):
    """End in order."""


class Ready(NamedTuple):
    """The engine can serve. What a front must know of it."""

    max_model_len: int
    vocab_size: int
    kernels: str  # what it computes with, in words


class Failed(NamedTuple):
    """There is no engine, or no more. `error` is a line for whoever runs the server."""

    error: str
    is_mistake: bool = False  # of the caller: a bad option, or a checkpoint that cannot be read


class Piece(NamedTuple):
    """What is new in one sample of a request."""

    sample: int  # which of the request's
    text: str
    token_ids: list[int]
    logprobs: Sequence[dict[int, Logprob]] | None
    finish_reason: str | None
    stop_reason: str | int | None


class Delta(NamedTuple):
    """What is new in a request."""

    request_id: str
    pieces: list[Piece]
    finished: bool
    num_cached_tokens: int  # of its prompt
    prompt_logprobs: Sequence[dict[int, Logprob] | None] | None = None
    error: str | None = None  # why it has failed
    is_refused: bool = False  # it was never in the engine: the request asks for what cannot be


class Step(NamedTuple):
    """What came of a step."""

    deltas: list[Delta]
    events: list[dict[str, Any]] | None = None  # while somebody watches the memory: trace/EVENTS.md


class Note(NamedTuple):
    """A line for whoever runs the server."""

    text: str


class Answer(NamedTuple):
    number: int
    value: Any


def send(pipe: Connection, message: Any) -> None:
    """Raises OSError if nobody is at the other end."""
    pipe.send_bytes(pickle.dumps(message, pickle.HIGHEST_PROTOCOL))


def receive(pipe: Connection) -> Any:
    """Wait for a message. Raises EOFError or OSError if nobody is at the other end."""
    return pickle.loads(pipe.recv_bytes())
