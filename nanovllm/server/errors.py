"""What is told to a client in place of an answer."""

from http import HTTPStatus
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response

from ..async_llm import EngineDeadError
from .requests import HungUp


class RequestFailed(Exception):
    """A request that broke off. Its text is for the client."""

    def __init__(self, error: str, status: int = 500) -> None:
        super().__init__(error)
        self.status = status


class NotServed(Exception):
    """What is asked for is not here: a model, an interface."""


class TooBusy(Exception):
    """As much waits as may. The same request may be taken later."""


RETRY_SECONDS = 1  # after which a client that was refused may come again
CODES = {401: "invalid_api_key", 404: "not_found", 429: "rate_limit_exceeded"}


def error_object(status: int, message: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """As OpenAI's server says it."""
    kind = "server_error" if status >= 500 else "rate_limit_error" if status == 429 else "invalid_request_error"
    return {"error": {"message": message, "type": kind, "param": param, "code": code or CODES.get(status)}}


def as_error(error: Exception) -> tuple[int, dict[str, Any]]:
    """The status of an exception, and what the client is told. Of what nobody has foreseen it is told nothing."""
    if isinstance(error, EngineDeadError):
        return 500, error_object(500, "the engine has ended")
    if isinstance(error, RequestFailed):
        return error.status, error_object(error.status, str(error))
    if isinstance(error, NotServed):
        return 404, error_object(404, str(error))
    if isinstance(error, TooBusy):
        return 429, error_object(429, str(error))
    if isinstance(error, HTTPException):  # of the routes: no such address, or not by this method
        return error.status_code, error_object(error.status_code, error.detail)
    if isinstance(error, ValueError):
        return 400, error_object(400, str(error))
    return 500, error_object(500, HTTPStatus(500).phrase)


def error_response(error: Exception) -> JSONResponse:
    status, told = as_error(error)
    headers = dict(getattr(error, "headers", None) or {})  # of an HTTPException: which methods are allowed
    if status in (429, 503):
        headers["Retry-After"] = str(RETRY_SECONDS)
    return JSONResponse(told, status, headers)


async def handle(request: Request, error: Exception) -> Response:
    return error_response(error)


async def note_hang_up(request: Request, error: Exception) -> Response:
    """Nobody reads it: the client has gone before its request or its answer was whole."""
    return Response(status_code=499)


def handlers() -> dict[Any, Any]:
    """By exception. The last is for what nobody has foreseen."""
    told = (ValueError, NotServed, TooBusy, RequestFailed, EngineDeadError, HTTPException, Exception)
    return {**dict.fromkeys(told, handle), ClientDisconnect: note_hang_up, HungUp: note_hang_up}
