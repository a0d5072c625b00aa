"""A server inside of a test: the front in the test's event loop, the engine in a thread that the test can look into."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from multiprocessing import Pipe
from threading import Thread
from typing import Any

import httpx

from ...engine.config import EngineArgs
from ...engine.llm_engine import LLMEngine
from ...server import engine_process
from ...server.engine_client import EngineClient
from ...server.options import ServerOptions
from ...server.run import Front, address_of, listening_sockets, make_front

SECONDS = 30.0


class ThreadAsProcess(Thread):
    exitcode = None

    def kill(self) -> None:
        raise AssertionError("the engine has not ended in order")


@dataclass
class Inside:
    front: Front
    engine: LLMEngine
    client: httpx.AsyncClient
    page: httpx.AsyncClient  # of the page's address: the same, unless it has one of its own
    status: asyncio.Task[int]  # the exit status, once it has ended

    @property
    def is_empty(self) -> bool:
        """Nothing is left of any request in the engine."""
        stats = self.engine.stats()
        return not self.engine.requests and stats.running == stats.waiting == stats.blocks_running == 0

    @property
    def num_begun(self) -> int:
        """Requests of which the front has heard."""
        engine = self.front.state.engine
        return engine.num_requests - engine.num_waiting_requests

    async def post(self, path: str = "/v1/completions", **body: Any) -> httpx.Response:
        return await self.client.post(path, json=body)


@asynccontextmanager
async def inside(
    model: Any, prepare: Callable[[LLMEngine], Any] | None = None, **options: Any
) -> AsyncIterator[Inside]:
    """`prepare` may change the engine, in its thread, before it serves."""
    engines: list[LLMEngine] = []

    def build(args: EngineArgs) -> LLMEngine:
        engines.append(LLMEngine.from_engine_args(args))
        if prepare:
            prepare(engines[0])
        return engines[0]

    args = EngineArgs(model=str(model), offload_policy="load")
    pipe, theirs = Pipe()
    thread = ThreadAsProcess(target=engine_process.serve, args=(theirs, args, build), daemon=True)
    thread.start()
    engine = EngineClient(pipe, thread)
    server = ServerOptions(**{"port": 0} | options)
    front = await make_front(str(model), args, server, "{{ messages[0].content }}", engine)
    with listening_sockets(server) as listeners:
        status = asyncio.create_task(front.run(*listeners))
        async with AsyncExitStack() as stack:
            clients = [httpx.AsyncClient(base_url=address_of(each), timeout=SECONDS) for each in listeners]
            for client in clients:
                await stack.enter_async_context(client)
            await until(lambda: front.is_started)
            yield Inside(front, engines[0], clients[0], clients[-1], status)
        if not front.state.is_stopping:
            front.stop()
        await status
    await engine.close()
    pipe.close()


async def until(holds: Callable[[], bool], seconds: float = SECONDS) -> None:
    async with asyncio.timeout(seconds):
        while not holds():
            await asyncio.sleep(0.005)
