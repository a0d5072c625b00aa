"""What is told to a client in place of an answer."""

from http import HTTPStatus
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse

from ..api import EngineDeadError


class RequestFailed(Exception):
    """A request that broke off. Its text is for the client."""

    def __init__(self, error: str, status: int = 500) -> None:
        super().__init__(error)
        self.status = status


class NotServed(Exception):
    """What is asked for is not here: a model, an interface."""


def error_object(status: int, message: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """As OpenAI's server says it."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def as_error(error: Exception) -> tuple[int, dict[str, Any]]:
    """The status of an exception, and what the client is told."""
    if isinstance(error, EngineDeadError):
        return 500, error_object(500, "the engine has ended")
    if isinstance(error, RequestFailed):
        return error.status, error_object(error.status, str(error))
    if isinstance(error, NotServed):
        return 404, error_object(404, str(error), code="not_found")
    if isinstance(error, HTTPException):  # of the routes: no such address, or not by this method
        return error.status_code, error_object(error.status_code, error.detail)
    if isinstance(error, ValueError):
        return 400, error_object(400, str(error))
    return 500, error_object(500, HTTPStatus(500).phrase)


async def error_response(request: Request, error: Exception) -> JSONResponse:
    status, told = as_error(error)
    return JSONResponse(told, status)


def handlers() -> dict[Any, Any]:
    """By exception. The last is for what nobody has foreseen."""
    return dict.fromkeys(
        (ValueError, NotServed, RequestFailed, EngineDeadError, HTTPException, Exception), error_response
    )
