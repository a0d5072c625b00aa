"""A connection of h11 that refuses what is too large, or can be read in two ways."""

from dataclasses import dataclass
from typing import Any

import h11

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
