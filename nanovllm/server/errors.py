"""Errors in OpenAI's format: {"error": {"message": ..., "type": ..., "param": ..., "code": ...}}."""

from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response

from ..async_llm import EngineDeadError
from .bodies import InvalidRequest

RETRY_SECONDS = 1  # for Retry-After: how long a refused client should wait
DEFAULT_CODES = {401: "invalid_api_key", 404: "not_found", 429: "rate_limit_exceeded"}


class ApiError(Exception):
    """An error with an HTTP status. Clients see its message."""

    def __init__(self, message: str, status: int, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.param, self.code = status, param, code


class HungUp(Exception):
    """The error raised if the client closes the connection before the response is ready."""


def error_object(status: int, message: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """Return the body of an error."""
    kind = "server_error" if status >= 500 else "rate_limit_error" if status == 429 else "invalid_request_error"
    return {"error": {"message": message, "type": kind, "param": param, "code": code or DEFAULT_CODES.get(status)}}


def as_error(error: Exception) -> tuple[int, dict[str, Any]]:
    """Return the HTTP status and body for an exception. Clients never see the text of an unexpected exception."""
    if isinstance(error, ApiError | InvalidRequest):
        return error.status, error_object(error.status, str(error), error.param, error.code)
    if isinstance(error, ValueError):  # from the engine, about values in the request
        return 400, error_object(400, str(error))
    if isinstance(error, HTTPException):
        return error.status_code, error_object(error.status_code, error.detail)
    if isinstance(error, EngineDeadError):
        return 500, error_object(500, "The engine has ended.")
    return 500, error_object(500, HTTPStatus(500).phrase)


async def error_response(request: Request, error: Exception) -> Response:
    """Return the response for an exception."""
    status, body = as_error(error)
    headers = {**(getattr(error, "headers", None) or {})}  # starlette sets Allow for a wrong method
    if status in (429, 503):
        headers["Retry-After"] = str(RETRY_SECONDS)
    if isinstance(error, HTTPException) and status in (404, 405) and error.detail == HTTPStatus(status).phrase:
        template = "Invalid URL ({} {})" if status == 404 else "Not allowed to {} on {}"
        body["error"]["message"] = template.format(request.method, request.url.path[:200]) + "."
    return JSONResponse(body, status, headers)


async def no_response(request: Request, error: Exception) -> Response:
    """Return an empty response. It is never sent, because the client has hung up."""
    return Response(status_code=499)


def exception_handlers() -> dict[Any, Callable[[Request, Exception], Awaitable[Response]]]:
    """Return the handler of each exception class."""
    kinds = (ValueError, ApiError, EngineDeadError, HTTPException, Exception)
    return {**dict.fromkeys(kinds, error_response), ClientDisconnect: no_response, HungUp: no_response}
