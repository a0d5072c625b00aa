"""Middleware for every request: API keys, checks of the Origin and Host headers, proxy prefixes and request ids.

All requests are HTTP, because uvicorn runs without WebSockets and without lifespan events.
"""

import hmac
import re
import uuid
from collections.abc import Iterable, Sequence
from contextlib import suppress
from ipaddress import ip_address

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..checks import short_repr
from .errors import error_object

HEALTH = "/health"
PUBLIC_PATHS = {"/", HEALTH, "/ping", "/version", "/metrics"}  # need no key, because they never show users' text
PAGE_PREFIX, EVENTS = "/page/", "/events"
REQUEST_ID = re.compile(r"[!-~]{1,200}")  # short and printable, because a response header repeats it


class ApiKeys:
    """Middleware that refuses requests without a valid key."""

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        self._app = app
        self._keys = [key.encode() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        header = Headers(scope=scope).get("authorization", "")
        if is_public(scope["path"], scope["method"]) or self._is_valid(header):
            await self._app(scope, receive, send)
            return
        message = "Incorrect API key provided." if header else "You didn't provide an API key."
        body = error_object(401, f"{message} Send it as a header: 'Authorization: Bearer YOUR_KEY'.")
        await JSONResponse(body, 401, {"WWW-Authenticate": "Bearer"})(scope, receive, send)

    def _is_valid(self, header: str) -> bool:
        scheme, _, key = header.partition(" ")
        sent_key = key.strip().encode("latin-1")
        # Compare the sent key with every key, each in constant time, so that the time reveals nothing about the keys.
        matches = [hmac.compare_digest(sent_key, each) for each in self._keys]
        return scheme.lower() == "bearer" and any(matches)


def is_public(path: str, method: str) -> bool:
    """Return whether a request needs no key.

    >>> is_public("/health", "GET"), is_public("/v1/completions", "POST"), is_public("/v1/completions", "OPTIONS")
    (True, False, True)
    """
    return method == "OPTIONS" or path in PUBLIC_PATHS or path.startswith(PAGE_PREFIX)


class OwnOrigin:
    """Middleware that refuses requests from pages of other websites.

    A browser sends a simple request to any server that a page names, and only hides the response: by then, the model
    has run. The Origin header names the site that the page comes from, so that site must be this server. A site could
    point its name at this machine (DNS rebinding), so the Host header must also be an IP address or a known name.
    Programs other than browsers send no Origin, and may use any host name, except to open the live page. However, a
    browser also omits Origin when a page sends a GET request to its own site, so a server without keys that only this
    machine can reach requires a known host name for everything but /health.
    """

    def __init__(
        self, app: ASGIApp, allowed_origins: Iterable[str], allowed_hosts: Iterable[str], is_private: bool = False
    ) -> None:
        """Allow these sites and host names. If `is_private`, all paths but /health require a known host name."""
        self._app, self._origins = app, {each.rstrip("/").lower() for each in allowed_origins}
        self._hosts, self._is_private = {host_name(each) for each in allowed_hosts}, is_private

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusal = self._refusal(Headers(scope=scope), scope["path"])
        if refusal is None:
            await self._app(scope, receive, send)
        else:
            await JSONResponse(error_object(403, refusal), 403)(scope, receive, send)

    def _refusal(self, headers: Headers, path: str) -> str | None:
        """Return why the request is refused, or None."""
        host, origin = headers.get("host", "").lower(), headers.get("origin", "").lower()
        if "*" in self._origins or origin in self._origins:
            return None
        is_checked = self._is_private and host and path != HEALTH
        if not (origin or is_page(path) or is_checked):  # a browser sends an Origin with each POST
            return None
        name = host_name(host)
        if not is_local(name) and self._hosts.isdisjoint({name, "*"}):
            return f"The host {short_repr(name)} is not allowed: list it in --allowed-hosts."
        if origin and origin.partition("://")[2] != host:
            return "Requests from pages of other sites are not allowed. Name them in --allowed-origins."
        return None


def is_page(path: str) -> bool:
    """Return whether a path belongs to the live page, whose events may show users' text."""
    return path in ("/", EVENTS) or path.startswith(PAGE_PREFIX)


def host_name(host: str) -> str:
    """Return the name or address in a Host header, in lower case and without its port.

    >>> host_name("GPU-box:8000"), host_name("gpu-box."), host_name("[::1]:8000"), host_name("10.0.0.7")
    ('gpu-box', 'gpu-box', '::1', '10.0.0.7')
    """
    return re.sub(r":\d*$", "", host.lower()).removesuffix(".").strip("[]")


def is_local(name: str) -> bool:
    """Return whether a name can't belong to a website: it is an IP address, or a name of the browser's own machine.

    >>> is_local("192.168.0.7"), is_local("::1"), is_local("localhost"), is_local("gpu-box"), is_local("evil.com")
    (True, True, True, False, False)
    """
    with suppress(ValueError):
        ip_address(name)
        return True
    return name == "localhost" or name.endswith(".localhost")


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach a server that listens at `host`.

    >>> is_loopback("127.0.0.2"), is_loopback("::1"), is_loopback("localhost"), is_loopback("0.0.0.0")
    (True, True, True, False)
    """
    with suppress(ValueError):
        return ip_address(host).is_loopback
    return is_local(host_name(host))


class RootPath:
    """Middleware that removes a proxy's prefix from paths, unless the proxy has already removed it."""

    def __init__(self, app: ASGIApp, prefix: str) -> None:
        self._app, self._prefix = app, prefix.rstrip("/")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        rest = scope["path"].removeprefix(self._prefix)
        if rest != scope["path"] and rest[:1] in ("", "/"):
            scope = {**scope, "path": rest or "/"}
        await self._app(scope, receive, send)


class RequestIds:
    """Middleware that gives each response an X-Request-Id: the client's if it is valid, or else a new one."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        client_id = Headers(scope=scope).get("x-request-id", "")
        request_id = client_id if REQUEST_ID.fullmatch(client_id) else uuid.uuid4().hex

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (b"x-request-id", request_id.encode())]
            await send(message)

        await self._app(scope, receive, send_with_id)
