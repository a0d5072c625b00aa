"""A request's body as JSON, and the client that hangs up while its answer is made."""

import asyncio
import json
import re
from collections import Counter
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, TypeVar

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.types import Receive

T = TypeVar("T")
MAX_NESTING = 128  # of objects and lists in a body
TEXT = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)  # in JSON
AS_SQUARE = bytes.maketrans(b"{}", b"[]")
NO_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
MAX_CONTAINERS = 1 << 15  # objects and lists of a body
LARGE = 1 << 16  # bytes of a body: to read more takes a while, in which nobody else is to wait


class HungUp(Exception):
    """Nobody waits for the answer any more."""


async def read_json(request: Request) -> dict[str, Any]:
    """The body. Raises ValueError if it is no JSON object.

    A page of another site can send a form or a plain text without asking: only JSON that says so is read.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise HTTPException(415, f"the Content-Type must be application/json, not {kind or 'left out'}")
    value = await aside(request, parse, await request.body())
    if not isinstance(value, dict):
        raise ValueError("the body must be a JSON object")
    return value


async def aside(request: Request, function: Callable[..., T], *values: Any) -> T:
    """What the function makes of the request's body, which has been read: in a thread if that is large."""
    if len(await request.body()) > LARGE:
        return await asyncio.to_thread(function, *values)
    return function(*values)


def parse(body: bytes) -> Any:
    """The value of JSON in UTF-8. Raises ValueError for anything else, and for what no part of the server may meet."""
    try:
        check_brackets(body)
        value = json.loads(body.decode(), parse_constant=refuse_constant, object_pairs_hook=object_of)
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


def check_brackets(body: bytes) -> None:
    """Of what may be JSON. Raises ValueError for more objects and lists than are read, and RecursionError for a depth.

    >>> check_brackets(b'[{"a": "]"}, []]')
    """
    if body.count(b"[") + body.count(b"{") <= MAX_NESTING:
        return
    brackets = TEXT.sub(b"", body).translate(AS_SQUARE, NO_BRACKETS)
    if (count := brackets.count(b"[")) > MAX_CONTAINERS:
        raise ValueError(f"the body has {count:,} objects and lists: at most {MAX_CONTAINERS:,} are read")
    if b"[" * (MAX_NESTING + 1) in brackets:
        raise RecursionError
    for _ in range(MAX_NESTING):  # a pair with nothing inside is taken out, a level each time
        brackets = brackets.replace(b"[]", b"")
    if b"[]" in brackets or brackets.count(b"[") > MAX_NESTING:
        raise RecursionError


def object_of(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Raises ValueError for a name that comes twice: which of the two is meant, each reader decides differently."""
    value = dict(pairs)
    if len(value) < len(pairs):
        counts = Counter(name for name, _ in pairs)
        twice = counts.most_common(1)[0][0]
        raise ValueError(f"the body has {twice[:60]!r} twice in one object")
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
