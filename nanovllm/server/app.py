"""The ASGI applications, one per address: routes, middleware and the access log."""

import logging
import time
from collections.abc import Container

from starlette.applications import Starlette
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..log import logger
from .chat import CHAT, ChatCompletionRequest, chat_chunks, chat_completion
from .completions import COMPLETIONS, CompletionRequest, completion, completion_chunks
from .embeddings import EMBEDDINGS, create_embedding
from .errors import exception_handlers
from .generation import endpoint
from .info import detokenize, health, list_models, retrieve_model, tokenize, version
from .metrics import show_metrics
from .options import read_list
from .page import page_routes
from .responses import RESPONSES, create_response
from .security import ApiKeys, OwnOrigin, RequestIds, RootPath, is_loopback
from .state import ServerState

MAX_PATH = 200  # the most characters of a path to write to the access log


def make_apps(state: ServerState) -> list[ASGIApp]:
    """Return an application for each address: one, or two if the page has its own. Each checks API keys and origins."""
    health_route = Route("/health", health, methods=["GET"])
    create_completion = endpoint(CompletionRequest, "cmpl-", completion, completion_chunks)
    create_chat_completion = endpoint(ChatCompletionRequest, "chatcmpl-", chat_completion, chat_chunks)
    api_routes = [
        health_route,
        Route("/ping", health, methods=["GET", "POST"]),
        Route("/version", version, methods=["GET"]),
        Route("/v1/models", list_models, methods=["GET"]),
        Route("/v1/models/{model:path}", retrieve_model, methods=["GET"]),
        Route(COMPLETIONS, create_completion, methods=["POST"]),
        Route(CHAT, create_chat_completion, methods=["POST"]),
        Route(RESPONSES, create_response, methods=["POST"]),
        Route(EMBEDDINGS, create_embedding, methods=["POST"]),
        Route("/tokenize", tokenize, methods=["POST"]),
        Route("/detokenize", detokenize, methods=["POST"]),
    ]
    host, page_address = state.options.host, state.options.page_address
    live_page_routes = page_routes(page_address is None, state.options.root_path)
    monitoring_routes = [Route("/metrics", show_metrics, methods=["GET"]), *live_page_routes]
    if page_address is None:
        return [make_app(state, api_routes + monitoring_routes, host)]
    return [make_app(state, api_routes, host), make_app(state, [health_route, *monitoring_routes], page_address[0])]


def make_app(state: ServerState, routes: list[Route], host: str) -> ASGIApp:
    """Return the application for one address, in layers of middleware. The last layer added sees requests first."""
    starlette = Starlette(routes=routes, exception_handlers=exception_handlers())
    starlette.state.server = state
    starlette.router.redirect_slashes = False  # answer an unknown path with 404
    app: ASGIApp = starlette
    origins, hosts = read_list(state.options.allowed_origins), read_list(state.options.allowed_hosts)
    hosts += filter(None, (state.options.host, state.options.page_host))
    if state.options.api_keys:
        app = ApiKeys(app, state.options.api_keys)
    app = OwnOrigin(app, origins, hosts, is_private=is_loopback(host) and not state.options.api_keys)
    if origins:
        app = CORSMiddleware(app, allow_origins=origins, allow_methods=["*"], allow_headers=["*"])
    app = RequestIds(app)
    if not state.options.disable_uvicorn_access_log and logger.isEnabledFor(logging.INFO):
        app = AccessLog(app, read_list(state.options.disable_access_log_for_endpoints))
    return RootPath(app, state.options.root_path) if state.options.root_path else app


class AccessLog:
    """Middleware that logs each request once it has ended: client, method, path, status and seconds.

    The status is 499 if the client hung up before the response began. Query strings are omitted, because they may
    contain secrets.
    """

    def __init__(self, app: ASGIApp, excluded_paths: Container[str]) -> None:
        self._app, self._excluded_paths = app, excluded_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] in self._excluded_paths:
            await self._app(scope, receive, send)
            return
        start, status = time.perf_counter(), 499

        async def send_and_note_status(message: Message) -> None:
            nonlocal status
            status = message.get("status", status)
            await send(message)

        try:
            await self._app(scope, receive, send_and_note_status)
        finally:
            client, path = scope["client"] or ("?", 0), scope["raw_path"].decode("latin-1")[:MAX_PATH]
            now, seconds = time.strftime("%Y-%m-%d %H:%M:%S"), time.perf_counter() - start
            logger.info(f"{now} {client[0]}:{client[1]} {scope['method']} {path} {status} {seconds:.3f} s")
