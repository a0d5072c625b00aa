"""HTTP as uvicorn speaks it through h11, for clients that are slow, send too much, or send what is no HTTP.

uvicorn waits for a request's head and body for ever, and answers broken HTTP in plain text. Here both have a time, a
body has a size, and whatever is wrong is told as OpenAI's servers tell it. Then the connection is closed.
"""

import asyncio
import json
from contextlib import suppress
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from .errors import error_object

LINGER = 0.5  # seconds that a client has to read why, before the connection is gone with all that it has sent
MAX_DISCARDED_BYTES = 1 << 22  # of what it sends meanwhile
MIN_CHUNK_BYTES = 16  # on average: each chunk of a body takes time, in which nobody else is served
MAX_SMALL_CHUNKS = 256


@dataclass(frozen=True)
class HttpLimits:
    head_seconds: float = 10.0
    body_seconds: float = 60.0
    max_head_bytes: int = 1 << 15
    max_body_bytes: int = 1 << 22


class CheckedConnection(h11.Connection):
    """It refuses a body as soon as it is known to be too large. `error` is why the client is not heard any more."""

    def __init__(self, limits: HttpLimits) -> None:
        super().__init__(h11.SERVER, limits.max_head_bytes)
        self.error: h11.RemoteProtocolError | None = None
        self._limits = limits
        self._num_bytes = self._num_chunks = 0  # of the body so far
        self._is_chunked = False

    def next_event(self) -> Any:
        """Raises h11.RemoteProtocolError; its error_status_hint is the status of the answer."""
        try:
            event = super().next_event()
            if isinstance(event, h11.Request):
                self._check_head(event)
                self._begin(dict(event.headers))
            elif isinstance(event, h11.Data):
                self._count(len(event.data))
            return event
        except h11.RemoteProtocolError as error:
            self.error = error
            raise

    def _check_head(self, request: h11.Request) -> None:
        """h11 looks at the size of a head that is not whole, and not of one that comes at once."""
        num_bytes = len(request.target) + sum(len(name) + len(value) for name, value in request.headers)
        if num_bytes > self._limits.max_head_bytes:
            why = f"its head has {num_bytes:,} bytes, the limit is {self._limits.max_head_bytes:,}"
            raise h11.RemoteProtocolError(why, error_status_hint=431)

    def _begin(self, headers: dict[bytes, bytes]) -> None:
        """A request has begun. h11 has seen that its length is a number."""
        self._num_bytes = self._num_chunks = 0
        self._is_chunked = b"transfer-encoding" in headers
        if self._is_chunked and b"content-length" in headers:  # a proxy before this server may read it otherwise
            raise h11.RemoteProtocolError("it has both a Content-Length and a Transfer-Encoding")
        if not self._is_chunked:
            self._check_size(int(headers.get(b"content-length", 0)))

    def _count(self, num_bytes: int) -> None:
        self._num_bytes += num_bytes
        self._num_chunks += 1
        self._check_size(self._num_bytes)
        if self._is_chunked and self._num_chunks > MAX_SMALL_CHUNKS:
            average = self._num_bytes / self._num_chunks
            if average < MIN_CHUNK_BYTES:
                why = f"its chunks have {average:.1f} bytes on average: at least {MIN_CHUNK_BYTES} are asked for"
                raise h11.RemoteProtocolError(why)

    def _check_size(self, num_bytes: int) -> None:
        if num_bytes > self._limits.max_body_bytes:
            why = f"its body has {num_bytes:,} bytes or more, the limit is {self._limits.max_body_bytes:,}"
            raise h11.RemoteProtocolError(why, error_status_hint=413)


class HttpProtocol(H11Protocol):
    """A connection. Its clock runs while the head or the body of a request is on its way."""

    conn: CheckedConnection

    def __init__(self, *args: Any, limits: HttpLimits, **options: Any) -> None:
        super().__init__(*args, **options)
        self.conn = CheckedConnection(limits)
        self._seconds = {h11.IDLE: limits.head_seconds, h11.SEND_BODY: limits.body_seconds}
        self._clocked: Any = None  # the state of the client in which the clock runs
        self._clock: asyncio.TimerHandle | None = None
        self._num_discarded: int | None = None  # bytes; a number once the client is not heard any more

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        if self._num_discarded is not None:
            self._discard(len(data))
            return
        super().data_received(data)
        self._watch()

    def eof_received(self) -> None:
        """The client sends no more. Who waits for an answer and says so is taken to have hung up, as by uvicorn."""
        if self._num_discarded is None and self._is_within_a_request():
            self._refuse(400, "the connection was closed before the request was whole")

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_clock()
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.conn.their_state is not h11.IDLE:  # else uvicorn's keep-alive time runs
            self._watch()

    def send_400_response(self, msg: str) -> None:
        """uvicorn calls it for whatever next_event() raises."""
        error = self.conn.error
        status = error.error_status_hint if error.error_status_hint < 500 else 400
        self._refuse(status, f"the request cannot be taken: {error}")

    def shutdown(self) -> None:
        """The server ends. It does not wait for the rest of a body."""
        if self._num_discarded is not None:
            self.transport.close()
        elif self.conn.their_state is h11.SEND_BODY:
            self._refuse(503, "the server is shutting down")
        else:
            super().shutdown()

    def _is_within_a_request(self) -> bool:
        return self.conn.their_state is h11.SEND_BODY or bool(self.conn.trailing_data[0])

    def _watch(self) -> None:
        """The clock goes on while the client's state is the same: a byte now and then does not stop it."""
        state = self.conn.their_state
        if state is self._clocked or self._num_discarded is not None:
            return
        self._stop_clock()
        if state in self._seconds:
            self._clocked = state
            self._clock = self.loop.call_later(self._seconds[state], self._too_slow)

    def _stop_clock(self) -> None:
        if self._clock is not None:
            self._clock.cancel()
        self._clock = self._clocked = None

    def _too_slow(self) -> None:
        seconds, part = self._seconds[self._clocked], "head" if self._clocked is h11.IDLE else "body"
        if self._is_within_a_request():
            self._refuse(408, f"the {part} of the request took more than {seconds:g} seconds")
        else:
            self.transport.close()  # it has said nothing, and is told nothing

    def _refuse(self, status: int, why: str) -> None:
        """Answer, unless an answer has begun; whoever reads the body sees a client that has hung up."""
        self._stop_clock()
        self._unset_keepalive_if_required()
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.write(answer(status, why))
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self._linger()

    def _linger(self) -> None:
        """Close the connection once the client has read the answer: to close it at once may take the answer away."""
        self._num_discarded = 0
        self.flow.resume_reading()
        with suppress(OSError):  # it may have gone meanwhile
            self.transport.write_eof()
        self._clock = self.loop.call_later(LINGER, self.transport.abort)

    def _discard(self, num_bytes: int) -> None:
        self._num_discarded += num_bytes
        if self._num_discarded > MAX_DISCARDED_BYTES:
            self.transport.abort()


def answer(status: int, why: str) -> bytes:
    """An answer as it goes over the wire, the last of its connection."""
    body = json.dumps(error_object(status, why)).encode()
    head = [
        f"HTTP/1.1 {status} {HTTPStatus(status).phrase}",
        "Content-Type: application/json",
        f"Content-Length: {len(body)}",
        "Connection: close",
    ]
    return "\r\n".join([*head, "", ""]).encode() + body
