"""A server in the test's own event loop, with its engine in a thread that the test can inspect."""

import asyncio
import math
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from ctypes import c_double
from dataclasses import dataclass, fields
from multiprocessing import Pipe
from threading import Thread
from typing import Any
from unittest.mock import patch

import httpx

from ...llm_engine import LLMEngine
from ...options.engine_args import EngineArgs
from ...progress import share_progress
from ...server import engine_process
from ...server.engine_client import EngineClient
from ...server.limits import HttpProtocol
from ...server.options import ServerOptions
from ...server.run import ApiServer, address_of, listening_sockets, make_api_server

SECONDS = 600.0  # of a loop whose clock a test may move
PAUSE = 0.005  # seconds between two looks of until()
SHORT = {"prompt": [5, 6], "max_tokens": 2, "temperature": 0}
LONG = {"prompt": "the fox", "max_tokens": 50, "ignore_eos": True, "temperature": 0}


class ThreadAsProcess(Thread):
    """A thread that stands in for the process of an EngineClient."""

    exitcode = None

    def kill(self) -> None:
        raise AssertionError("the engine did not end by itself")


@dataclass
class Inside:
    """A server, and clients for its one or two addresses."""

    front: ApiServer
    engine: LLMEngine
    client: httpx.AsyncClient
    page: httpx.AsyncClient  # the same address, unless the page has its own
    status: asyncio.Task[int]  # the exit status
    received: list[bytes]  # what the server has read from its clients

    @property
    def is_empty(self) -> bool:
        """True if the engine holds nothing of any request."""
        stats = self.engine.stats()
        return not self.engine.requests and stats.running == stats.waiting == stats.blocks_running == 0

    @property
    def num_started(self) -> int:
        """The number of requests with an output."""
        engine = self.front.state.engine
        return sum(not each.num_waiting_tokens for each in engine.running.values())

    async def read(self, writer: asyncio.StreamWriter, data: bytes) -> None:
        """Send bytes, and wait until the server has read them."""
        num_bytes = len(b"".join(self.received)) + len(data)
        writer.write(data)
        await until(lambda: len(b"".join(self.received)) >= num_bytes)

    async def post(self, path: str = "/v1/completions", **body: Any) -> httpx.Response:
        return await self.client.post(path, json=body)


@asynccontextmanager
async def inside(
    model: Any,
    prepare: Callable[[LLMEngine], Any] | None = None,
    template: str = "{{ messages[0].content }}",
    clock: Callable[[], float] = time.monotonic,
    **options: Any,
) -> AsyncIterator[Inside]:
    """Run a server inside a `with` block. `prepare` may change the engine before it serves."""
    engines: list[LLMEngine] = []
    received: list[bytes] = []
    loop, data_received = asyncio.get_running_loop(), HttpProtocol.data_received

    def recorded(self: HttpProtocol, data: bytes) -> None:
        data_received(self, data)
        received.append(data)

    def build(args: EngineArgs) -> LLMEngine:
        engines.append(LLMEngine.from_engine_args(args))
        engines[0].loop_of_test = loop  # type: ignore[attr-defined]
        if prepare:
            prepare(engines[0])
        return engines[0]

    engine_options = {field.name for field in fields(EngineArgs)} - {field.name for field in fields(ServerOptions)}
    given = {name: options.pop(name) for name in engine_options & options.keys()}
    args = EngineArgs(model=str(model), **{"offload_policy": "load"} | given)
    pipe, engines_end = Pipe()
    progress = c_double(math.inf)
    share_progress(progress, clock)
    thread = ThreadAsProcess(target=engine_process.serve, args=(engines_end, args, build), daemon=True)
    thread.start()
    engine = EngineClient(pipe, thread, progress, clock)
    server = ServerOptions(**{"port": 0} | options)
    front = await make_api_server(str(model), args, server, template, engine)
    with listening_sockets(server) as listeners, patch.object(HttpProtocol, "data_received", recorded):
        status = asyncio.create_task(front.run(*listeners))
        async with AsyncExitStack() as stack:
            urls = map(address_of, listeners)
            clients = [httpx.AsyncClient(base_url=url, timeout=SECONDS, verify=False) for url in urls]
            for client in clients:
                await stack.enter_async_context(client)
            await until(lambda: all(server.started for server in front.servers))
            yield Inside(front, engines[0], clients[0], clients[-1], status, received)
        if not front.state.is_stopping:
            front.stop()
        await status
    await engine.close()
    pipe.close()


async def until(holds: Callable[[], bool], seconds: float = SECONDS) -> None:
    async with asyncio.timeout(seconds):
        while not holds():
            await asyncio.sleep(PAUSE)


def slow(engine: LLMEngine) -> None:
    """Let the test's loop run between two steps, however busy the machine is: until() looks at least once."""
    step, loop = engine.step, engine.loop_of_test  # type: ignore[attr-defined]

    def wait_then_step() -> Any:
        has_run = threading.Event()
        loop.call_soon_threadsafe(loop.call_later, 2 * PAUSE, has_run.set)
        assert has_run.wait(SECONDS)
        return step()

    engine.step = wait_then_step  # type: ignore[method-assign]


def error_of(response: httpx.Response, status: int) -> dict[str, Any]:
    """Return the error in OpenAI's form."""
    assert response.status_code == status, response.text
    value = response.json()
    assert set(value) == {"error"} and set(value["error"]) == {"message", "type", "param", "code"}
    return value["error"]
