"""/v1/responses: a chat in the words of OpenAI's newer interface. Texts only, and nothing is stored."""

from collections.abc import AsyncGenerator
from contextlib import aclosing

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from ..engine_client import EngineClient
from ..limits import check_counts
from ..messages import Piece
from ..request_stream import joined
from ..requests import read_json, unless_hung_up
from .completions import begin, samples_of
from .fields import CHAT
from .response_bodies import read_response_body
from .response_objects import ResponseObjects, status_of
from .streaming import stream
from .work import Work, new_id


async def create_response(request: Request) -> Response:
    """The answer, whole or as a stream. Raises ValueError for a body that cannot be served."""
    engine = request.app.state.server.engine
    asked = await read_json(request)
    check_counts(asked)
    body = read_response_body(asked)
    work = await begin(request, CHAT, body.chat)
    work.id = new_id("resp", "_")
    objects = ResponseObjects(work, body)
    if work.body.stream:
        return await stream(events_of(engine, work, objects), objects.as_event, request.receive)
    sample = (await unless_hung_up(request.receive, samples_of(engine, work)))[0]
    return JSONResponse(objects.response(status_of(sample), sample))


async def events_of(engine: EngineClient, work: Work, objects: ResponseObjects) -> AsyncGenerator[bytes, None]:
    """Raises what engine.generate() raises."""
    sample: Piece | None = None
    async with aclosing(engine.generate(work.requests)) as deltas, aclosing(work.pieces(deltas)) as pieces:
        async for _, piece in pieces:
            before = objects.beginning() if sample is None else b""
            sample = piece if sample is None else joined(sample, piece)
            if event := before + objects.delta(piece):
                yield event
    assert sample is not None, "a request ends with an output"
    yield objects.ending(sample)
