"""The endpoints that don't run the model: its names, tokenization, and the server's health and version."""

import asyncio
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from .. import __version__
from .bodies import Body, InvalidRequest, TokenIds
from .chat import ChatBody
from .errors import ApiError
from .limits import read_as
from .served_model import LONG_TEXT, ServedModel
from .state import ServerState

# /v1/models


async def list_models(request: Request) -> Response:
    """List the model, once under each of its names."""
    state = request.app.state.server
    return JSONResponse({"object": "list", "data": [model_object(request, name) for name in state.model.names]})


async def retrieve_model(request: Request) -> Response:
    """Return the model's entry under one of its names. Raise ApiError 404 for any other name."""
    name = request.path_params["model"]
    request.app.state.server.model.check_name(name)
    return JSONResponse(model_object(request, name))


def model_object(request: Request, name: str) -> dict[str, Any]:
    """Return the entry in /v1/models for one of the model's names."""
    state = request.app.state.server
    return {
        "id": name,
        "object": "model",
        "created": int(state.start_time),
        "owned_by": "nanovllm",
        "root": name,
        "parent": None,
        "max_model_len": state.model.max_model_len,
    }


# /tokenize and /detokenize


class TokenizeRequest(ChatBody):
    """The body of /tokenize: a text or a conversation."""

    prompt: str | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


async def tokenize(request: Request) -> Response:
    """Return the token ids of a text or a conversation."""
    model: ServedModel = request.app.state.server.model
    body = await read_as(TokenizeRequest, request)
    model.check_name(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequest("Set either 'prompt' or 'messages'.", "prompt")
    prompt = body.chat() if body.prompt is None else body.prompt
    adds_special = isinstance(prompt, str) if body.add_special_tokens is None else body.add_special_tokens
    ids = (await model.tokenize(prompt, adds_special)).token_ids
    strings = [model.require_tokenizer().backend.id_to_token(id) for id in ids] if body.return_token_strs else None
    return JSONResponse({"count": len(ids), "max_model_len": model.max_model_len, "tokens": ids, "token_strs": strings})


class DetokenizeRequest(Body):
    """The body of /detokenize."""

    tokens: TokenIds


async def detokenize(request: Request) -> Response:
    """Convert token ids to text."""
    model: ServedModel = request.app.state.server.model
    body = await read_as(DetokenizeRequest, request)
    model.check_name(body.model)
    tokenizer = model.require_tokenizer()
    if invalid_ids := [id for id in body.tokens if not 0 <= id < len(tokenizer)]:
        raise InvalidRequest(f"Invalid 'tokens': {invalid_ids[0]} is not from 0 to {len(tokenizer) - 1}.", "tokens")
    decode = partial(tokenizer.decode, body.tokens, skip_special_tokens=False)
    return JSONResponse({"prompt": await asyncio.to_thread(decode) if len(body.tokens) > LONG_TEXT else decode()})


# /health, /ping and /version


async def health(request: Request) -> Response:
    """Return status 200. Raise ApiError 503 once the engine has ended, or while it is stuck."""
    state: ServerState = request.app.state.server
    if state.engine.error or state.is_stuck:
        message = f"The engine has work, and has made no progress for {state.engine.stalled_seconds:,.0f} seconds."
        raise ApiError("The engine has ended." if state.engine.error else message, 503)
    return Response()


async def version(request: Request) -> Response:
    """Return the version of nanovllm."""
    return JSONResponse({"version": __version__})
