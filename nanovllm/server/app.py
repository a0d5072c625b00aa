"""The applications, one for each address, what they share, and what is asked of them by which path."""

import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from starlette.applications import Starlette
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from .. import __version__
from .auth import ApiKeys
from .engine_client import EngineClient
from .errors import handlers
from .events import Feed
from .limits import Rejections
from .metrics import show_metrics
from .openai.completions import create_chat_completion, create_completion
from .openai.models import list_models, retrieve_model
from .openai.responses import create_response
from .openai.served import ServedModel
from .openai.tokenize import detokenize, tokenize
from .options import ServerOptions
from .origins import OwnOrigin, read_origins
from .page_routes import page_routes
from .request_ids import RequestIds


@dataclass
class State:
    """What all requests share: `request.app.state.server`."""

    options: ServerOptions
    engine: EngineClient
    model: ServedModel
    kernels: str  # what the engine computes with, in words
    start_time: float = field(default_factory=time.time)
    is_stopping: bool = False  # no new requests
    rejections: Rejections = field(default_factory=Counter)  # since the start
    feed: Feed = field(init=False)  # of the page

    def __post_init__(self) -> None:
        self.feed = Feed(lambda is_on: self.engine.watch(is_on, self.options.show_text))
        self.engine.on_events = self.feed.take


Endpoint = Callable[[Request], Awaitable[Response]]


def health_route() -> Route:
    return Route("/health", health, methods=["GET"])


def api_routes() -> list[Route]:
    """What clients ask for."""
    return [
        health_route(),
        Route("/ping", health, methods=["GET", "POST"]),
        Route("/version", version, methods=["GET"]),
        Route("/v1/models", list_models, methods=["GET"]),
        Route("/v1/models/{model:path}", retrieve_model, methods=["GET"]),
        Route("/v1/completions", create_completion, methods=["POST"]),
        Route("/v1/chat/completions", create_chat_completion, methods=["POST"]),
        Route("/v1/responses", create_response, methods=["POST"]),
        Route("/tokenize", tokenize, methods=["POST"]),
        Route("/detokenize", detokenize, methods=["POST"]),
    ]


def watching_routes(can_prompt: bool) -> list[Route]:
    """What shows the engine: the page, and numbers. `can_prompt`: clients ask at the same address."""
    return [Route("/metrics", show_metrics, methods=["GET"]), *page_routes(can_prompt)]


def make_apps(state: State) -> list[ASGIApp]:
    """One for each address. Keys and origins hold at each of them."""
    if state.options.page_address is None:
        return [make_app(state, [*api_routes(), *watching_routes(can_prompt=True)])]
    return [make_app(state, api_routes()), make_app(state, [health_route(), *watching_routes(can_prompt=False)])]


def make_app(state: State, routes: list[Route]) -> ASGIApp:
    app = Starlette(routes=routes, exception_handlers=handlers())
    app.state.server = state
    app.router.redirect_slashes = False  # what is not here is a 404
    return wrapped(app, state)


def wrapped(app: ASGIApp, state: State) -> ASGIApp:
    """The application behind what every request goes through, the outermost last."""
    origins = read_origins(state.options.allowed_origins)
    if state.options.api_keys:
        app = ApiKeys(app, state.options.api_keys)
    app = OwnOrigin(app, origins)
    if origins:
        app = CORSMiddleware(app, allow_origins=origins, allow_methods=["*"], allow_headers=["*"])
    return RequestIds(app)


async def health(request: Request) -> Response:
    """200 while there is an engine, else 503."""
    return Response(status_code=503 if request.app.state.server.engine.error else 200)


async def version(request: Request) -> Response:
    return JSONResponse({"version": __version__})
