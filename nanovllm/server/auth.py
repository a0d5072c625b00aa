"""Who may ask, where the server has keys: whoever shows one of them."""

import hashlib
import hmac
from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from .errors import error_object
from .small_answers import send_json

WITHOUT_A_KEY = {"/", "/health", "/ping", "/version", "/metrics"}  # they tell no text
PAGE = "/page/"


class ApiKeys:
    """Refuses a request without one of the keys: Authorization: Bearer KEY."""

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        self._app = app
        self._digests = [digest(key.encode()) for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or is_open(scope["path"], scope["method"]) or self._is_known(Headers(scope=scope)):
            await self._app(scope, receive, send)
            return
        told = error_object(401, "this server asks for an API key: Authorization: Bearer KEY")
        await send_json(send, 401, told, {"WWW-Authenticate": "Bearer"})

    def _is_known(self, headers: Headers) -> bool:
        scheme, _, key = headers.get("authorization", "").partition(" ")
        given = digest(key.strip().encode("latin-1"))
        # All are compared, each in constant time: how long it takes says nothing about any of them.
        matches = [hmac.compare_digest(given, each) for each in self._digests]
        return scheme.lower() == "bearer" and any(matches)


def digest(key: bytes) -> bytes:
    """Of one length, whatever the key's."""
    return hashlib.sha256(key).digest()


def is_open(path: str, method: str) -> bool:
    """
    >>> is_open("/health", "GET"), is_open("/v1/completions", "POST"), is_open("/v1/completions", "OPTIONS")
    (True, False, True)
    """
    return method == "OPTIONS" or path in WITHOUT_A_KEY or path.startswith(PAGE)
