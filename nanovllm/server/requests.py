"""A request's body as JSON, and the client that hangs up while its answer is made."""

import asyncio
import json
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any, TypeVar

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.types import Receive

from ..api.json_schema import nesting

T = TypeVar("T")
MAX_NESTING = 128  # of objects and lists in a body


class HungUp(Exception):
    """Nobody waits for the answer any more."""


async def read_json(request: Request) -> dict[str, Any]:
    """The body. Raises ValueError if it is no JSON object.

    A page of another site can send a form or a plain text without asking: only JSON that says so is read.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise HTTPException(415, f"the Content-Type must be application/json, not {kind or 'left out'}")
    value = parse(await request.body())
    if not isinstance(value, dict):
        raise ValueError("the body must be a JSON object")
    return value


def parse(body: bytes) -> Any:
    """The value of JSON in UTF-8. Raises ValueError for anything else, and for what no part of the server may meet."""
    try:
        value = json.loads(body.decode(), parse_constant=refuse_constant)
        if body.count(b"[") + body.count(b"{") > MAX_NESTING and nesting(value) > MAX_NESTING:
            raise RecursionError
        if rb"\ud" in body or rb"\uD" in body:
            json.dumps(value, ensure_ascii=False).encode()
    except UnicodeDecodeError:
        raise ValueError("the body is no UTF-8 text") from None
    except UnicodeEncodeError:
        raise ValueError("the body has half of a character: a surrogate without its pair") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"the body is no JSON: {error.msg} in line {error.lineno}, column {error.colno}") from None
    except RecursionError:
        raise ValueError(f"the body is nested more than {MAX_NESTING} levels deep") from None
    return value


def refuse_constant(name: str) -> None:
    raise ValueError(f"the body is no JSON: it has {name}")


async def unless_hung_up(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """What `work` returns. It is cancelled if the client hangs up meanwhile, and HungUp is raised.

    The body of the request must have been read: what comes next is the hang-up.
    """
    task, watch = asyncio.ensure_future(work), asyncio.ensure_future(hang_up(receive))
    try:
        await asyncio.wait([task, watch], return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise HungUp
        return task.result()
    finally:
        for each in (task, watch):
            each.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await each


async def hang_up(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
