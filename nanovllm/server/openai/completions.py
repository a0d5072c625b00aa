"""/v1/completions and /v1/chat/completions."""

from contextlib import aclosing
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from ..engine_client import EngineClient
from ..errors import RequestFailed
from ..messages import Piece
from ..request_stream import joined
from ..requests import HungUp, read_json, unless_hung_up
from .bodies import read_body
from .choices import chat_choice, completion_choice
from .fields import CHAT, COMPLETIONS
from .streaming import stream
from .work import Work, work_of


async def create_completion(request: Request) -> Response:
    return await create(request, COMPLETIONS)


async def create_chat_completion(request: Request) -> Response:
    return await create(request, CHAT)


async def create(request: Request, url: str) -> Response:
    """The answer, whole or as a stream. Raises ValueError for a body that cannot be served."""
    state = request.app.state.server
    body = read_body(url, await read_json(request), state.model.unsaid)
    if state.is_stopping:
        raise RequestFailed("the server is shutting down", status=503)
    work = await work_of(state, body)
    try:
        if body.stream:
            return await stream(state.engine, work, request.receive)
        return JSONResponse(await unless_hung_up(request.receive, whole_answer(state.engine, work)))
    except HungUp:
        return Response(status_code=499)  # for the log: nobody reads it


async def whole_answer(engine: EngineClient, work: Work) -> dict[str, Any]:
    samples: dict[int, Piece] = {}
    async with aclosing(engine.generate(work.requests)) as deltas, aclosing(work.pieces(deltas)) as pieces:
        async for index, piece in pieces:
            samples[index] = joined(samples[index], piece) if index in samples else piece
    choices = [choice(work, index, samples[index]) for index in sorted(samples)]
    kind = "chat.completion" if work.body.is_chat else "text_completion"
    return {**work.head(kind), "choices": choices, "usage": work.usage()}


def choice(work: Work, index: int, sample: Piece) -> dict[str, Any]:
    if work.body.is_chat:
        return chat_choice(sample, index, work.params.logprobs)
    return completion_choice(sample, index)
