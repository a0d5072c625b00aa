"""A server in the test's own process, with its engine in a thread, so that tests can compare the page with it."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import Pipe
from typing import Any

import httpx

from nanovllm.llm_engine import LLMEngine
from nanovllm.options.engine_args import EngineArgs
from nanovllm.server import engine_process
from nanovllm.server.engine_client import EngineClient
from nanovllm.server.options import ServerOptions
from nanovllm.server.page import Feed
from nanovllm.server.run import ApiServer, address_of, listening_socket, make_api_server
from nanovllm.tests.testing.inside import ThreadAsProcess
from nanovllm.trace import Tracer

SECONDS = 60.0


def memory(engine: LLMEngine) -> dict[str, Any]:
    """Return which sequences hold which blocks, and which blocks are free."""
    pool, scheduler = engine.kv_cache_manager.pool, engine.scheduler
    running = [[list(seq.block_table), seq.num_computed_tokens] for seq in scheduler.running]
    return {
        "running": running,
        "waiting": len(scheduler.waiting),
        "free": list(pool.free),
        "ref_counts": list(pool.ref_counts),
        "cached": {str(block): True for block in sorted(pool.cached.values())},
        "is_watched": any(isinstance(each, Tracer) for each in engine.observers),
    }


@dataclass
class Live:
    """A server that runs in another thread."""

    front: ApiServer
    loop: asyncio.AbstractEventLoop
    url: str
    memories: list[dict[str, Any]]  # one per request for the engine's metrics

    @property
    def feed(self) -> Feed:
        return self.front.state.feed

    def memory(self) -> dict[str, Any]:
        """Return the engine's memory between two steps, read in its own thread."""
        asyncio.run_coroutine_threadsafe(self.front.state.engine.get_metrics(), self.loop).result(SECONDS)
        return self.memories[-1]

    def complete(self, **body: Any) -> dict[str, Any]:
        request = {"prompt": "Once upon a time", "temperature": 0, "max_tokens": 8} | body
        response = httpx.post(f"{self.url}/v1/completions", json=request, timeout=SECONDS)
        assert response.status_code == 200, response.text
        return response.json()

    def call(self, function: Any, *args: Any) -> None:
        """Call a function in the server's thread."""
        self.loop.call_soon_threadsafe(function, *args)


@contextmanager
def living(args: EngineArgs, **options: Any) -> Iterator[Live]:
    """Run a server inside a `with` block."""
    lives: list[Live] = []
    memories: list[dict[str, Any]] = []
    is_ready = threading.Event()

    def build(args: EngineArgs) -> LLMEngine:
        engine = LLMEngine.from_engine_args(args)
        get_metrics = engine.get_metrics

        def get_metrics_with_memory() -> Any:
            memories.append(memory(engine))
            return get_metrics()

        engine.get_metrics = get_metrics_with_memory
        return engine

    async def main() -> None:
        pipe, theirs = Pipe()
        engine_thread = ThreadAsProcess(target=engine_process.serve, args=(theirs, args, build), daemon=True)
        engine_thread.start()
        engine = EngineClient(pipe, engine_thread)
        front = await make_api_server(str(args.model), args, ServerOptions(**options), None, engine)
        with listening_socket("127.0.0.1", 0) as listener:
            lives.append(Live(front, asyncio.get_running_loop(), address_of(listener), memories))
            asyncio.get_running_loop().call_later(0.1, is_ready.set)
            await front.run(listener)
        await engine.close()

    thread = threading.Thread(target=asyncio.run, args=(main(),), daemon=True)
    thread.start()
    assert is_ready.wait(SECONDS), "the server has not started"
    yield lives[0]
    lives[0].call(lives[0].front.stop)
    thread.join(SECONDS)
    assert not thread.is_alive(), "an open page must not keep the server from stopping"
