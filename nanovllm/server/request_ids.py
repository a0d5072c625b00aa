"""X-Request-Id: each answer has one, the client's own if it gave one."""

import re
import uuid

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

NAME = b"x-request-id"
ALLOWED = re.compile(r"[!-~]{1,200}")  # what is echoed is short, and one line


class RequestIds:
    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = id_for(Headers(scope=scope).get("x-request-id", "")).encode()

        async def send_named(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (NAME, request_id)]
            await send(message)

        await self._app(scope, receive, send_named)


def id_for(given: str) -> str:
    """
    >>> id_for("my-7"), len(id_for("two words")), len(id_for(""))
    ('my-7', 32, 32)
    """
    return given if ALLOWED.fullmatch(given) else uuid.uuid4().hex
