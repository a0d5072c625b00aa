"""A request's body as JSON, and the client that hangs up while its answer is made."""

import asyncio
import json
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.types import Receive

T = TypeVar("T")


class HungUp(Exception):
    """Nobody waits for the answer any more."""


async def read_json(request: Request) -> dict[str, Any]:
    """The body. Raises ValueError if it is no JSON object."""
    try:
        value = json.loads(await request.body(), parse_constant=refuse_constant)
    except UnicodeDecodeError:
        raise ValueError("the body is no UTF-8 text") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"the body is no JSON: {error.msg} in line {error.lineno}, column {error.colno}") from None
    except RecursionError:
        raise ValueError("the body is nested too deeply") from None
    if not isinstance(value, dict):
        raise ValueError("the body must be a JSON object")
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
