"""/v1/completions and /v1/chat/completions."""

from contextlib import aclosing
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from ..engine_client import EngineClient
from ..errors import RequestFailed
from ..limits import check_counts, check_room, check_size
from ..messages import Piece
from ..request_stream import joined
from ..requests import aside, read_json, unless_hung_up
from .bodies import read_body
from .choices import chat_choice, completion_choice, told_of_prompt
from .chunks import as_chunk, events_of
from .fields import CHAT, COMPLETIONS
from .streaming import stream
from .work import Work, work_of


async def create_completion(request: Request) -> Response:
    return await create(request, COMPLETIONS)


async def create_chat_completion(request: Request) -> Response:
    return await create(request, CHAT)


async def create(request: Request, url: str) -> Response:
    """The answer, whole or as a stream. Raises ValueError for a body that cannot be served."""
    engine = request.app.state.server.engine
    work = await begin(request, url, await read_json(request))
    if work.body.stream:
        return await stream(events_of(engine, work), as_chunk, request.receive)
    samples = await unless_hung_up(request.receive, samples_of(engine, work))
    return JSONResponse(whole_answer(work, samples))


async def begin(request: Request, url: str, body: dict[str, Any]) -> Work:
    """What the body asks for. Raises ValueError, and what else an answer may be in its place."""
    state = request.app.state.server
    check_counts(body)
    asked = await aside(request, read_body, url, body, state.model.unsaid)
    if state.is_stopping:
        raise RequestFailed("the server is shutting down", status=503)
    work = await work_of(state, asked)
    check_size(work.requests, state.options, state.model.max_model_len)
    check_room(work.requests, state.options, state.engine, state.rejections)
    return work


async def samples_of(engine: EngineClient, work: Work) -> dict[int, Piece]:
    """The whole output of each choice."""
    samples: dict[int, Piece] = {}
    async with aclosing(engine.generate(work.requests)) as deltas, aclosing(work.pieces(deltas)) as pieces:
        async for index, piece in pieces:
            samples[index] = joined(samples[index], piece) if index in samples else piece
    return dict(sorted(samples.items()))


def whole_answer(work: Work, samples: dict[int, Piece]) -> dict[str, Any]:
    kind = "chat.completion" if work.body.is_chat else "text_completion"
    choices = [choice(work, index, sample) for index, sample in samples.items()]
    told = told_of_prompt(work.prompt_logprobs.get(0)) if work.body.is_chat else {}
    return {**work.head(kind), "choices": choices, "usage": work.usage(), **told}


def choice(work: Work, index: int, sample: Piece) -> dict[str, Any]:
    if work.body.is_chat:
        return chat_choice(sample, index, work.params.num_logprobs)
    return completion_choice(sample, index) | told_of_prompt(work.prompt_logprobs.get(index // work.params.n))
