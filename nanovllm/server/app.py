"""The applications, one per address: their routes, and the state that all requests share."""

import time
from collections import Counter
from dataclasses import dataclass, field

from starlette.applications import Starlette
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from .. import __version__
from .engine_client import EngineClient
from .errors import handlers
from .metrics import show_metrics
from .openai import create_chat_completion, create_completion, create_response
from .options import ServerOptions, read_list
from .page import Feed, page_routes
from .protocol import CHAT, COMPLETIONS, RESPONSES
from .security import ApiKeys, OwnOrigin, RequestIds
from .served_model import ServedModel, detokenize, list_models, retrieve_model, tokenize


@dataclass
class ServerState:
    """The state that all requests share: `request.app.state.server`."""

    options: ServerOptions
    engine: EngineClient
    model: ServedModel
    kernels: str  # a description of what the engine computes with
    start_time: float = field(default_factory=time.time)
    is_stopping: bool = False  # refuse new requests
    rejections: Counter[str] = field(default_factory=Counter)  # since the start, by limit
    feed: Feed = field(init=False)  # the page's events

    def __post_init__(self) -> None:
        """Connect the feed with the engine."""
        self.feed = Feed(lambda is_on: self.engine.watch(is_on, self.options.show_text))
        self.engine.on_events = self.feed.take


def make_apps(state: ServerState) -> list[ASGIApp]:
    """Return an application for each address. Keys and origins apply to all of them."""
    health_route = Route("/health", health, methods=["GET"])
    api_routes = [
        health_route,
        Route("/ping", health, methods=["GET", "POST"]),
        Route("/version", version, methods=["GET"]),
        Route("/v1/models", list_models, methods=["GET"]),
        Route("/v1/models/{model:path}", retrieve_model, methods=["GET"]),
        Route(COMPLETIONS, create_completion, methods=["POST"]),
        Route(CHAT, create_chat_completion, methods=["POST"]),
        Route(RESPONSES, create_response, methods=["POST"]),
        Route("/tokenize", tokenize, methods=["POST"]),
        Route("/detokenize", detokenize, methods=["POST"]),
    ]
    is_one = state.options.page_address is None
    watch_routes = [Route("/metrics", show_metrics, methods=["GET"]), *page_routes(can_prompt=is_one)]
    if is_one:
        return [make_app(state, api_routes + watch_routes)]
    return [make_app(state, api_routes), make_app(state, [health_route, *watch_routes])]


def make_app(state: ServerState, routes: list[Route]) -> ASGIApp:
    """Return an application behind its middleware. The outermost comes last."""
    starlette = Starlette(routes=routes, exception_handlers=handlers())
    starlette.state.server = state
    starlette.router.redirect_slashes = False  # an unknown path is a 404
    app: ASGIApp = starlette
    origins, hosts = read_list(state.options.allowed_origins), read_list(state.options.allowed_hosts)
    hosts += filter(None, (state.options.host, state.options.page_host))
    if state.options.api_keys:
        app = ApiKeys(app, state.options.api_keys)
    app = OwnOrigin(app, origins, hosts)
    if origins:
        app = CORSMiddleware(app, allow_origins=origins, allow_methods=["*"], allow_headers=["*"])
    return RequestIds(app)


async def health(request: Request) -> Response:
    """Return 200, or 503 once the engine has ended."""
    return Response(status_code=503 if request.app.state.server.engine.error else 200)


async def version(request: Request) -> Response:
    """Return the version of nanovllm."""
    return JSONResponse({"version": __version__})
