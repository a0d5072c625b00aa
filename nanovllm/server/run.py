"""The server from its start to its exit status: sockets, signals, and the two processes."""

import asyncio
import resource
import signal
import socket
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial

import uvicorn
from starlette.types import ASGIApp

from ..async_llm import EngineDeadError
from ..checkpoints.chat_template import read_template
from ..llm_engine import LLMEngine
from ..log import logger
from ..options.engine_args import EngineArgs
from . import collector
from .app import make_apps
from .engine_client import EngineClient, start_engine
from .engine_process import Build
from .limits import HttpProtocol
from .options import ServerOptions
from .served_model import served_model
from .state import ServerState

UNHEALTHY_SECONDS = 1.0  # how long /health reports a dead engine before the server stops
GRACE_SECONDS = 2.0  # from the end of shutdown_timeout until open connections are closed
SWITCH_SECONDS = 0.001  # how long the event loop waits until another thread must release the interpreter's lock


def run_server(model: str, args: EngineArgs, options: ServerOptions, build: Build = LLMEngine.from_engine_args) -> int:
    """Serve until a signal arrives or the engine ends. Return the exit status.

    Raise ValueError for invalid options, or OSError for a port that is in use, before the model is read.
    """
    logger.setLevel(options.log_level.upper())
    template = read_template(options.chat_template)
    args.engine_config()
    with listening_sockets(options) as listeners:
        return asyncio.run(serve(model, args, options, template, listeners, build))


async def serve(
    model: str,
    args: EngineArgs,
    options: ServerOptions,
    template: str | None,
    listeners: Sequence[socket.socket],
    build: Build,
) -> int:
    """Start the engine's process and serve. Return the exit status."""
    logger.info(f"loading {model}")
    engine = EngineClient(*start_engine(args, build))
    try:
        api_server = await make_api_server(model, args, options, template, engine)
        loop = asyncio.get_running_loop()
        for signal_number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(signal_number, api_server.stop)
        prepare_process()
        return await api_server.run(*listeners)
    except EngineDeadError as error:
        logger.error(f"error: {error}")
        return 1
    finally:
        await engine.close()


async def make_api_server(
    model: str, args: EngineArgs, options: ServerOptions, template: str | None, engine: EngineClient
) -> "ApiServer":
    """Wait for the engine, and build the API server. Raise ValueError for an invalid model, else EngineDeadError."""
    state = await make_state(model, args, options, template, engine)
    api_server = ApiServer(state, [Server(uvicorn_config(app, options)) for app in make_apps(state)])
    engine.on_death = api_server.die
    return api_server


async def make_state(
    model: str, args: EngineArgs, options: ServerOptions, template: str | None, engine: EngineClient
) -> ServerState:
    """Wait for the engine, and build the applications' state. Raise the errors of make_api_server()."""
    ready = await engine.ready()
    names = [each] if isinstance(each := args.served_model_name, str) else each or []
    parsers = options.tool_call_parser, options.reasoning_parser
    served = served_model(model, args, names, template, parsers, ready.max_model_len)
    return ServerState(options, engine, served, ready.kernels)


def uvicorn_config(app: ASGIApp, options: ServerOptions) -> uvicorn.Config:
    """Return uvicorn's configuration for one application."""
    return uvicorn.Config(
        app,
        http=partial(HttpProtocol, limits=options),  # type: ignore[arg-type]  # uvicorn calls it like a class
        ws="none",
        lifespan="off",
        log_level=options.uvicorn_log_level,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=int(options.shutdown_timeout + GRACE_SECONDS) + 1,
    )


class Server(uvicorn.Server):
    """A uvicorn server without signal handlers."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to the ApiServer. With uvicorn's handlers, the process would not exit with status 0."""
        yield


@dataclass
class ApiServer:
    """The server at one or two addresses, and the ways to stop it."""

    state: ServerState
    servers: Sequence[Server]  # the second one, if any, serves the page
    failed: bool = False

    async def run(self, *listeners: socket.socket) -> int:
        """Serve at `listeners` until stop() or die(). Return the exit status."""
        for listener in listeners:
            listener.listen()  # a client may connect as soon as it reads the lines below
        url, *page_urls = map(address_of, listeners)
        logger.info(f"serving {self.state.model.name} at {url}, {self.state.kernels}")
        for page_url in page_urls:
            logger.info(f"the page and /metrics are at {page_url}")
        pairs = zip(self.servers, listeners, strict=True)
        await asyncio.gather(*(server.serve([listener]) for server, listener in pairs))
        return 1 if self.failed else 0

    def stop(self) -> None:
        """Refuse new requests, and let running ones finish. End them after shutdown_timeout, or when called again.

        If the engine is stuck, end the requests and kill the engine immediately.
        """
        if self.state.is_stopping:
            self._cut()
            return
        self.state.is_stopping = True
        for server in self.servers:
            server.should_exit = True
        self.state.feed.close()
        if self.state.is_stuck:
            logger.error(f"error: the engine has made no progress for {self.state.engine.stalled_seconds:,.0f} seconds")
            self._cut()
            self.state.engine.kill()
            return
        seconds = self.state.options.shutdown_timeout
        if running := self.state.engine.num_requests:
            logger.info(f"stopping: {running} requests have {seconds:g} seconds to finish")
        asyncio.get_running_loop().call_later(seconds, self._cut)

    def die(self) -> None:
        """Report the engine's end to clients for UNHEALTHY_SECONDS, then stop."""
        self.failed = True
        self.state.feed.close()
        logger.error(f"error: {self.state.engine.error}")
        asyncio.get_running_loop().call_later(UNHEALTHY_SECONDS, self.stop)

    def _cut(self) -> None:
        self.state.engine.cut("The server is shutting down.")


# Sockets


@contextmanager
def listening_sockets(options: ServerOptions) -> Iterator[list[socket.socket]]:
    """Open a socket for clients, and another for the page if it has its own address. Close them after the block."""
    addresses = [(options.host, options.port), options.page_address]
    with ExitStack() as stack:
        yield [stack.enter_context(listening_socket(*address)) for address in addresses if address]


def listening_socket(host: str, port: int) -> socket.socket:
    """Bind a socket, but don't listen yet. Raise OSError if the address is in use or invalid.

    The socket's protocol is set, because asyncio disables Nagle's algorithm only if it knows the protocol. With Nagle's
    algorithm, a response's body waits for the client's delayed acknowledgment of the headers: 40 ms on Linux.
    """
    try:
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, address = addresses[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except (OSError, UnicodeError) as error:  # UnicodeError: the host is not a valid DNS name
        reason = error.strerror if isinstance(error, OSError) else None
        raise OSError(f"cannot listen at {host}, port {port}: {reason or error}") from None
    return listener


def address_of(listener: socket.socket) -> str:
    """Return the URL at which a socket listens."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


# The API server's process


def prepare_process() -> None:
    """Prepare this process for many clients, so that no client waits long for another one."""
    collector.hold_back()
    sys.setswitchinterval(SWITCH_SECONDS)
    _, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(OSError, ValueError):  # each client is an open file; some systems grant less than they report
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard_limit, hard_limit))
