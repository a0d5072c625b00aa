"""The front from the first moment to the exit status."""

import asyncio
import signal
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import uvicorn

from ..async_llm import EngineDeadError
from ..checkpoints.chat_template import read_template
from ..engine.config import EngineArgs
from ..engine.llm_engine import LLMEngine
from ..log import tell
from .addresses import address_of, listening_sockets
from .app import State, make_apps
from .checked_connection import HttpLimits
from .engine_client import EngineClient, start_engine
from .engine_process import Build
from .http_protocol import HttpProtocol
from .openai.served import served_model
from .options import ServerOptions
from .system import prepare

RED = 1.0  # seconds in which /health says that the engine is dead, before the front ends, too
STUCK = 2.0  # seconds after the last answer should have ended, until connections are closed by force


class Server(uvicorn.Server):
    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to Front: uvicorn would end the process by the signal, and not with status 0."""
        yield


@dataclass
class Front:
    """A server that runs, at one address or two, and the ways to end it."""

    state: State
    servers: Sequence[Server]  # the second, if there is one, has the page
    failed: bool = False

    async def run(self, *listeners: socket.socket) -> int:
        """Serve until stop() or die(), a server at each of `listeners`; returns the exit status."""
        for listener in listeners:
            listener.listen()  # whoever reads the lines below may come at once
        first, *others = map(address_of, listeners)
        tell(f"serving {self.state.model.name} at {first}, {self.state.kernels}")
        for address in others:
            tell(f"the page and its numbers are at {address}")
        pairs = zip(self.servers, listeners, strict=True)
        await asyncio.gather(*(server.serve([listener]) for server, listener in pairs))
        return 1 if self.failed else 0

    @property
    def is_started(self) -> bool:
        return all(server.started for server in self.servers)

    def stop(self) -> None:
        """No new requests. Those that run may end; after shutdown_timeout, or if this is called again, they are cut."""
        if self.state.is_stopping:
            self._cut()
            return
        self.state.is_stopping = True
        for server in self.servers:
            server.should_exit = True
        self.state.feed.close()
        seconds = self.state.options.shutdown_timeout
        if running := self.state.engine.num_requests:
            tell(f"stopping: {running} requests have {seconds:g} seconds to end")
        asyncio.get_running_loop().call_later(seconds, self._cut)

    def die(self) -> None:
        """The engine has ended: whoever asks hears it for a moment."""
        self.failed = True
        self.state.feed.close()
        tell(f"error: {self.state.engine.error}")
        asyncio.get_running_loop().call_later(RED, self.stop)

    def _cut(self) -> None:
        self.state.engine.cut("the server is shutting down")


def run_server(model: str, args: EngineArgs, options: ServerOptions, build: Build = LLMEngine.from_engine_args) -> int:
    """Serve until a signal or the engine's end; returns the exit status.

    Raises ValueError or OSError, before anything is served, for what cannot be.
    """
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
    engine = EngineClient(*start_engine(args, build))
    try:
        front = await make_front(model, args, options, template, engine)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, front.stop)
        prepare(loop)
        return await front.run(*listeners)
    except EngineDeadError as error:
        tell(f"error: {error}")
        return 1
    finally:
        await engine.close()


async def make_front(
    model: str, args: EngineArgs, options: ServerOptions, template: str | None, engine: EngineClient
) -> Front:
    """Raises ValueError for a model that cannot be served, and EngineDeadError."""
    about = await engine.ready()
    served = served_model(model, str(args.model), served_names(args.served_model_name), template, about.max_model_len)
    state = State(options, engine, served, about.kernels)
    front = Front(state, [Server(config_of(app, options)) for app in make_apps(state)])
    engine.on_death = front.die
    return front


def served_names(given: Any) -> Sequence[str]:
    return [given] if isinstance(given, str) else given or []


def config_of(app: Any, options: ServerOptions) -> uvicorn.Config:
    limits = HttpLimits(
        head_seconds=options.header_timeout,
        body_seconds=options.body_timeout,
        max_body_bytes=options.max_body_bytes,
    )
    return uvicorn.Config(
        app,
        http=partial(HttpProtocol, limits=limits),  # type: ignore[arg-type]  # what makes one for each connection
        ws="none",
        lifespan="off",
        log_level="error",
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=int(options.shutdown_timeout + STUCK) + 1,
    )
