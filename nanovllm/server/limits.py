"""Limits on slow, large and numerous requests.

uvicorn waits forever for a request's head and body, and for a client that doesn't read its response. Its answers to
malformed HTTP are plain text. HttpProtocol adds timeouts, CheckedConnection adds size limits, and HttpProtocol sends
an error in OpenAI's format before it closes the connection. It also writes the chunks of streams, as long as the client
reads. The functions after these classes limit the cost of a valid request.
"""

import asyncio
import json
import pickle
import re
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from http import HTTPStatus
from typing import Any, TypeVar
from weakref import proxy

import h11
from starlette.requests import Request
from uvicorn.protocols.http.h11_impl import H11Protocol

from ..log import logger
from ..requests.sampling_params import SamplingParams
from .bodies import MAX_CHOICES, Body, InvalidRequest, shortened
from .engine_client import EngineClient
from .engine_process import Add
from .errors import ApiError, error_object
from .options import ServerOptions
from .state import ServerState

AnyBody = TypeVar("AnyBody", bound=Body)
MAX_HEAD_BYTES = 1 << 15  # of a request's head: the request line and the headers
MIN_CHUNK_BYTES = 64  # a smaller chunk of a body counts as this many, because each chunk costs the event loop time
LINGER_SECONDS = 0.5  # time for a client to read an error before its connection is aborted
MAX_IGNORED = 64  # the most unknown fields to log, because clients could invent any number of them
MAX_REPEATED_BYTES = 1 << 23  # of sampling parameters, which are sent to the engine with each prompt of a body
MAX_JSON_PARTS = 1 << 17  # objects, arrays and fields in a body; Python takes a long time to build more
JSON_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)


# Connections


class CheckedConnection(h11.Connection):
    """An h11 connection that refuses requests that are too large or ambiguous. `error` is the last refusal."""

    def __init__(self, max_body_bytes: int) -> None:
        super().__init__(h11.SERVER, MAX_HEAD_BYTES)
        self.error: h11.RemoteProtocolError | None = None
        self._max_body_bytes, self._num_bytes = max_body_bytes, 0

    def next_event(self) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
        """Return the next event. Raise h11.RemoteProtocolError, whose error_status_hint is the response's status."""
        try:
            event = super().next_event()
            if isinstance(event, h11.Request):
                self._begin(dict(event.headers))
            elif isinstance(event, h11.Data):
                self._count(max(len(event.data), MIN_CHUNK_BYTES))
            return event
        except h11.RemoteProtocolError as error:
            self.error = error
            raise

    def _begin(self, headers: dict[bytes, bytes]) -> None:
        """Check the headers of a new request. h11 has already checked that its length is a number."""
        if b"transfer-encoding" in headers and b"content-length" in headers:  # a proxy could go by either of them
            raise h11.RemoteProtocolError("both Content-Length and Transfer-Encoding are set")
        self._num_bytes = 0
        self._check_size(int(headers.get(b"content-length", 0)))

    def _count(self, num_bytes: int) -> None:
        self._num_bytes += num_bytes
        self._check_size(self._num_bytes)

    def _check_size(self, num_bytes: int) -> None:
        """Refuse a body as soon as it is known to be too large."""
        if (limit := self._max_body_bytes) < num_bytes:
            reason = f"the body has at least {num_bytes:,} bytes, and at most {limit:,} are allowed"
            raise h11.RemoteProtocolError(reason, error_status_hint=413)


class Timer:
    """A timer that can be stopped and started again."""

    def __init__(self) -> None:
        self._handle: asyncio.TimerHandle | None = None

    def start(self, seconds: float, callback: Callable[[], None]) -> None:
        """Call `callback` after `seconds`, unless the timer is stopped or restarted before then."""
        self.stop()
        self._handle = asyncio.get_running_loop().call_later(seconds, callback)

    def stop(self) -> None:
        """Stop the timer if it is running."""
        if self._handle is not None:
            self._handle.cancel()


class HttpProtocol(H11Protocol):
    """A client's connection. Its main timer runs while the head or the body of a request is arriving."""

    conn: CheckedConnection

    def __init__(self, *args: Any, limits: ServerOptions, **options: Any) -> None:
        super().__init__(*args, **options)
        self.conn = CheckedConnection(limits.max_body_bytes)
        # For endpoints that stream: see Work.events(). A reference would be a cycle, which only the collector frees.
        self.app_state = {**self.app_state, "connection": proxy(self)}
        self._read_timeout = limits.body_timeout
        self._timeouts = {h11.IDLE: ("head", limits.header_timeout), h11.SEND_BODY: ("body", limits.body_timeout)}
        self._timer, self._read_timer = Timer(), Timer()  # the latter runs while the client doesn't read
        self._state: type | None = None  # the client's state when the main timer was last set
        self._is_refused = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # uvicorn narrows it too
        """Start the timer for the head of the first request."""
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        """Parse the data, or discard it if the client was refused."""
        if not self._is_refused:
            super().data_received(data)
            self._watch()

    def can_write(self) -> bool:
        """Return True if write() may be called: a stream has begun, and the client reads it and knows chunks."""
        is_streaming = self.conn.our_state is h11.SEND_BODY and (self.conn.their_http_version or b"") > b"1.0"
        return is_streaming and not (self._is_refused or self.flow.write_paused or self.transport.is_closing())

    def write(self, data: bytes) -> None:
        """Send a chunk of a stream at once. It has the bytes that h11 would take several times as long to make."""
        self.transport.write(b"%x\r\n%b\r\n" % (len(data), data))

    def eof_received(self) -> None:
        """Refuse a request that ends early. uvicorn treats the end of any other input as a disconnect."""
        if not self._is_refused and self._is_within_request():
            self._refuse(400, "The connection was closed before the request was complete.")

    def pause_writing(self) -> None:
        """Start the read timer, because the client isn't reading."""
        super().pause_writing()
        self._read_timer.start(self._read_timeout, self.transport.abort)

    def resume_writing(self) -> None:
        """Stop the read timer, because the client is reading again."""
        super().resume_writing()
        self._read_timer.stop()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop both timers."""
        self._timer.stop()
        self._read_timer.stop()
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        """Start the timer for the next request, unless uvicorn's keep-alive timer is running."""
        super().on_response_complete()
        if self.conn.trailing_data[0]:  # the head of another request has begun, so the connection isn't idle
            self._unset_keepalive_if_required()
        if self.conn.trailing_data[0] or self.conn.their_state is not h11.IDLE:
            self._watch()

    def send_400_response(self, msg: str) -> None:
        """Refuse the client. uvicorn calls this after next_event() has raised."""
        error = self.conn.error
        assert error is not None, "uvicorn must call this only after next_event() has raised"
        status = error.error_status_hint if error.error_status_hint < 500 else 400
        self._refuse(status, f"We could not read the HTTP request: {error}.")

    def shutdown(self) -> None:
        """End the connection without waiting for the rest of a body."""
        if self.conn.their_state is h11.SEND_BODY and not self._is_refused:
            self._refuse(503, "The server is shutting down.")
        elif not self._is_refused:
            super().shutdown()

    def _is_within_request(self) -> bool:
        return self.conn.their_state is h11.SEND_BODY or bool(self.conn.trailing_data[0])

    def _watch(self) -> None:
        """Start the timer if the client's state has changed. More bytes of the same head or body don't restart it."""
        if (state := self.conn.their_state) is self._state or self._is_refused:
            return
        self._state = state
        self._timer.stop()
        if state in self._timeouts:
            part, seconds = self._timeouts[state]
            self._timer.start(seconds, partial(self._time_out, part, seconds))

    def _time_out(self, part: str, seconds: float) -> None:
        if self._is_within_request():
            self._refuse(408, f"The {part} of the request took more than {seconds:g} seconds.")
        else:
            self.transport.close()  # the client has sent nothing, so it expects no response

    def _refuse(self, status: int, message: str) -> None:
        """Send an error, unless a response has begun, and close the connection.

        An endpoint that is reading the body sees a disconnect. The client gets time to read the error, because closing
        immediately could discard it.
        """
        self._is_refused = True
        self._unset_keepalive_if_required()
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.write(last_response(status, message))
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self.flow.resume_reading()
        with suppress(OSError):  # the client may be gone
            self.transport.write_eof()
        self._timer.start(LINGER_SECONDS, self.transport.abort)


def last_response(status: int, message: str) -> bytes:
    """Return an error as the raw bytes of a connection's last HTTP response."""
    body = json.dumps(error_object(status, message))
    head = f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(body)}\r\nConnection: close\r\n\r\n{body}".encode()


# Requests


async def read_body(request: Request) -> bytes:
    """Return the body of a request. Raise ApiError or InvalidRequest.

    The body must be declared as JSON: browsers let pages of other sites send forms and plain text, but not JSON.
    """
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/json":
        message = f"Unsupported content type: '{media_type[:100]}'. This server accepts 'application/json' only."
        raise ApiError(message, 415, code="unsupported_content_type")
    body = await request.body()
    check_json_size(body)
    return body


async def read_as(body_class: type[AnyBody], request: Request) -> AnyBody:
    """Parse a request's body as a `body_class`, and log each unknown field once. Raise ApiError or InvalidRequest."""
    body = body_class.parse(await read_body(request))
    state: ServerState = request.app.state.server
    for name in body.unknown_fields() - state.ignored_fields:
        if len(state.ignored_fields) < MAX_IGNORED:
            state.ignored_fields.add(name)
            logger.warning(f"warning: ignoring the unknown field {shortened(name)} of {request.url.path}")
    return body


def check_json_size(body: bytes) -> None:
    """Raise InvalidRequest if the JSON has too many objects, arrays and fields."""
    if num_parts(body) > MAX_JSON_PARTS and (count := num_parts(JSON_STRING.sub(b"", body))) > MAX_JSON_PARTS:
        message = f"The body has {count:,} objects, arrays and fields, and at most {MAX_JSON_PARTS:,} are allowed."
        raise InvalidRequest(message)


def num_parts(text: bytes) -> int:
    """Return the number of objects, arrays and fields in JSON from which strings have been removed.

    >>> num_parts(b'[{: 1, : []}]')
    5
    """
    return text.count(b"[") + text.count(b"{") + text.count(b":")


def check_size(requests: Sequence[Add], options: ServerOptions, max_model_len: int) -> None:
    """Raise InvalidRequest if the requests of one body may cost more than the options allow."""
    num_choices = sum(request.params.n for request in requests)
    if num_choices > MAX_CHOICES:
        message = f"The request needs {num_choices:,} choices, but a response can have at most {MAX_CHOICES:,}."
        raise InvalidRequest(message, "n")
    num_bytes = len(pickle.dumps(requests[0]._replace(token_ids=[], prompt=None)))  # sent again for each prompt
    if len(requests) > 1 and len(requests) * num_bytes > MAX_REPEATED_BYTES:
        message = f"The request has {num_bytes:,} bytes of parameters for each of {len(requests):,} prompts, and"
        raise InvalidRequest(f"{message} at most {MAX_REPEATED_BYTES:,} bytes in total are allowed.", "prompt")
    for request in requests:
        must_generate = request.params.max_tokens != 0
        if len(request.token_ids) + must_generate > max_model_len:  # check before the engine reads the prompt
            limit = f"This model's maximum context length is {max_model_len} tokens."
            prompt = f"However, your prompt has {len(request.token_ids)} tokens"
            prompt += ", and at least one must be generated." if must_generate else "."
            raise InvalidRequest(f"{limit} {prompt} Please shorten the prompt.", "prompt", "context_length_exceeded")
    check_logprobs(requests[0].params, options)
    num_tokens = sum(request.params.n * max_num_tokens(request, max_model_len) for request in requests)
    if options.max_request_tokens is not None and num_tokens > options.max_request_tokens:
        message = f"The request may need {num_tokens:,} tokens, prompts and outputs together, but this server allows"
        raise InvalidRequest(f"{message} {options.max_request_tokens:,}.", "max_tokens")


def check_logprobs(params: SamplingParams, options: ServerOptions) -> None:
    """Raise InvalidRequest for too many log-probabilities. They would slow down each step for all requests."""
    limit = options.max_logprobs
    for name, count in (("logprobs", params.logprobs), ("prompt_logprobs", params.prompt_logprobs)):
        if count is not None and limit >= 0 and not 0 <= count <= limit:
            note = " (top_logprobs in a chat)" if name == "logprobs" else ""
            message = f"Invalid '{name}'{note}: this server's max_logprobs is {limit}, but got {count}."
            raise InvalidRequest(message, name)


def max_num_tokens(request: Add, max_model_len: int) -> int:
    """Return the most tokens that one sample of a request can have, including its prompt."""
    max_tokens = request.params.max_tokens
    return max_model_len if max_tokens is None else min(len(request.token_ids) + max_tokens, max_model_len)


def check_load(requests: Sequence[Add], options: ServerOptions, engine: EngineClient, rejections: Counter[str]) -> None:
    """Raise ApiError 429, and count the rejection, if too much is running or waiting. Both limits are vLLM's options.

    For max_num_queued_reqs, each sample counts as a request. For max_num_queued_tokens, all tokens of a prompt count
    until it has output.
    """
    limit, num_added = options.max_num_queued_reqs, sum(request.params.n for request in requests)
    if limit is not None and engine.num_samples + num_added > limit:
        name = "max_num_queued_reqs"
        running = f"{engine.num_samples} requests are running or waiting"
        message = f"{running}, and {num_added} more would exceed {name}, which is {limit}."
    elif (limit := options.max_num_queued_tokens) is not None and engine.num_waiting_tokens >= limit:
        name = "max_num_queued_tokens"
        message = f"Prompts of {engine.num_waiting_tokens:,} tokens are waiting, and {name} is {limit:,}."
    else:
        return
    rejections[name] += 1
    raise ApiError(message, 429)
