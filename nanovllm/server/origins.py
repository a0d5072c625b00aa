"""Pages of which servers may ask: this one's own, and those that --allowed-origins names."""

import json
from collections.abc import Sequence
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from .errors import error_object
from .small_answers import send_json


class OwnOrigin:
    """Refuses what a page of another server asks for.

    A browser sends a simple request wherever a page wants, and keeps only the answer from it: by then the model has
    run. It names the page's server in Origin.
    """

    def __init__(self, app: ASGIApp, allowed: Sequence[str]) -> None:
        self._app, self._allowed = app, {each.rstrip("/") for each in allowed}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or self._is_allowed(Headers(scope=scope)):
            await self._app(scope, receive, send)
            return
        told = error_object(403, "requests of other servers' pages are not served: --allowed-origins names such")
        await send_json(send, 403, told)

    def _is_allowed(self, headers: Headers) -> bool:
        origin = headers.get("origin")
        if origin is None or "*" in self._allowed or origin in self._allowed:
            return True
        return own_host(origin) == headers.get("host", "").lower()


def own_host(origin: str) -> str | None:
    """
    >>> own_host("http://localhost:8000"), own_host("null"), own_host("http://[")
    ('localhost:8000', None, None)
    """
    try:
        return urlsplit(origin.lower()).netloc or None
    except ValueError:
        return None


def read_origins(given: str | None) -> list[str]:
    """A list in JSON, as vLLM takes it, or names with commas between them. Raises ValueError.

    >>> read_origins("http://a, http://b"), read_origins('["*"]'), read_origins(None)
    (['http://a', 'http://b'], ['*'], [])
    """
    if given is None or not given.startswith("["):
        return [each.strip() for each in (given or "").split(",") if each.strip()]
    try:
        origins = json.loads(given)
    except json.JSONDecodeError:
        origins = None
    if not isinstance(origins, list) or not all(isinstance(each, str) for each in origins):
        raise ValueError(f"allowed_origins must be a list of texts, not {given}")
    return origins
