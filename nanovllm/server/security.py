"""Middleware for every request: API keys, origins of web pages, and request ids."""

import hmac
import re
import uuid
from collections.abc import Sequence
from contextlib import suppress
from ipaddress import ip_address

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .errors import error_object

PUBLIC = {"/", "/health", "/ping", "/version", "/metrics"}  # these need no key, because they never show users' text
PAGE, EVENTS = "/page/", "/events"
REQUEST_ID = re.compile(r"[!-~]{1,200}")  # short and a single line, since a header repeats it


class ApiKeys:
    """Middleware that refuses a request without one of the keys."""

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        self._app = app
        self._keys = [key.encode() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or is_public(scope["path"], scope["method"]):
            await self._app(scope, receive, send)
            return
        header = Headers(scope=scope).get("authorization", "")
        if self._is_valid(header):
            await self._app(scope, receive, send)
            return
        message = "Incorrect API key provided." if header else "You didn't provide an API key."
        body = error_object(401, f"{message} Send it as a header: 'Authorization: Bearer YOUR_KEY'.")
        await JSONResponse(body, 401, {"WWW-Authenticate": "Bearer"})(scope, receive, send)

    def _is_valid(self, header: str) -> bool:
        scheme, _, key = header.partition(" ")
        given = key.strip().encode("latin-1")
        # Compare all of them in constant time, so that the time reveals nothing about any of them.
        matches = [hmac.compare_digest(given, each) for each in self._keys]
        return scheme.lower() == "bearer" and any(matches)


def is_public(path: str, method: str) -> bool:
    """Return whether a request needs no key.

    >>> is_public("/health", "GET"), is_public("/v1/completions", "POST"), is_public("/v1/completions", "OPTIONS")
    (True, False, True)
    """
    return method == "OPTIONS" or path in PUBLIC or path.startswith(PAGE)


class OwnOrigin:
    """Middleware that refuses requests of other sites' pages.

    A browser sends simple requests to any site that a page names, and only hides the response. By then the model has
    run. The Origin header names the page's own site. It must be this server, by an address or a name that no other
    site can have: a site may point its own name at this machine (DNS rebinding).
    """

    def __init__(self, app: ASGIApp, allowed: Sequence[str]) -> None:
        self._app, self._allowed = app, {each.rstrip("/").lower() for each in allowed}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or self._is_allowed(Headers(scope=scope), scope["path"]):
            await self._app(scope, receive, send)
            return
        body = error_object(403, "Requests from pages of other sites are not allowed. Name them in --allowed-origins.")
        await JSONResponse(body, 403)(scope, receive, send)

    def _is_allowed(self, headers: Headers, path: str) -> bool:
        host, origin = headers.get("host", "").lower(), headers.get("origin", "").lower()
        if "*" in self._allowed or origin in self._allowed:
            return True
        if not origin and path != EVENTS:  # a browser sends it with each POST, and /events may show users' text
            return True
        is_own = not origin or origin.partition("://")[2] == host
        return is_own and (is_own_name(host) or f"http://{host}" in self._allowed)


def is_own_name(host: str) -> bool:
    """Return whether a Host header is an IP address, or a name without a dot, which no site on the internet has.

    >>> is_own_name("127.0.0.1:8000"), is_own_name("[::1]:8000"), is_own_name("localhost"), is_own_name("evil.com:80")
    (True, True, True, False)
    """
    name = re.sub(r":\d+$", "", host)
    with suppress(ValueError):
        ip_address(name.strip("[]"))
        return True
    return "." not in name or name.endswith(".localhost")


class RequestIds:
    """Middleware that gives each response an X-Request-Id: the client's own, or a new one."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id", "")
        request_id = given if REQUEST_ID.fullmatch(given) else uuid.uuid4().hex

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (b"x-request-id", request_id.encode())]
            await send(message)

        await self._app(scope, receive, send_with_id)
