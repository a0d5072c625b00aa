"""A server in the test's own process, with its engine in another: what the page shows is compared with the engine's."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx

from nanovllm.api import EngineArgs, LLMEngine
from nanovllm.server import engine_process
from nanovllm.server.app import State, make_app
from nanovllm.server.engine_client import EngineClient
from nanovllm.server.openai.served import served_model
from nanovllm.server.options import ServerOptions
from nanovllm.server.run import Server, config_of, listening_socket

SECONDS = 60.0


def build(args: EngineArgs) -> LLMEngine:
    """In the engine's process: what a test asks of it is answered there, too."""
    engine_process.ANSWERS["memory"] = memory
    return LLMEngine.from_engine_args(args)


def memory(engine: LLMEngine) -> dict[str, Any]:
    """Between two steps: who holds which blocks, and what is free."""
    pool, scheduler = engine.kv_cache_manager._pool, engine.scheduler
    running = [[seq.block_table, seq.num_computed_tokens] for seq in scheduler.running]
    free, cached = list(pool._free), {str(block): True for block in pool._cached.values()}
    is_watched = hasattr(engine.step, "is_hook")
    return {"running": running, "free": free, "ref_counts": list(pool.ref_counts), "cached": cached} | {
        "waiting": len(scheduler.waiting), "is_watched": is_watched,
    }  # fmt: skip


@dataclass
class Front:
    """A server that runs in a thread; a test calls it from another."""

    state: State
    loop: asyncio.AbstractEventLoop
    url: str

    def memory(self) -> dict[str, Any]:
        return asyncio.run_coroutine_threadsafe(self.state.engine.ask("memory"), self.loop).result(SECONDS)

    def complete(self, **body: Any) -> dict[str, Any]:
        asked = {"prompt": "Once upon a time", "temperature": 0, "max_tokens": 8} | body
        response = httpx.post(f"{self.url}/v1/completions", json=asked, timeout=SECONDS)
        assert response.status_code == 200, response.text
        return response.json()

    def call(self, function: Any, *args: Any) -> None:
        """In the server's thread."""
        self.loop.call_soon_threadsafe(function, *args)


@contextmanager
def serving(args: EngineArgs, **options: Any) -> Iterator[Front]:
    started, front = threading.Event(), {}

    async def main() -> None:
        engine = EngineClient(args, build)
        try:
            about = await engine.ready()
            model = served_model("storyteller", str(args.model), ["storyteller"], None, about.max_model_len)
            state = State(ServerOptions(**options), engine, model)
            with listening_socket("127.0.0.1", 0) as listener:
                server = Server(config_of(make_app(state), state.options))
                url = f"http://127.0.0.1:{listener.getsockname()[1]}"
                front.update(front=Front(state, asyncio.get_running_loop(), url), server=server)
                asyncio.get_running_loop().call_soon(started.set)
                await server.serve([listener])
        finally:
            await engine.close()
            started.set()

    thread = threading.Thread(target=asyncio.run, args=(main(),), daemon=True)
    thread.start()
    started.wait(SECONDS)
    try:
        yield front["front"]
    finally:
        front["front"].call(front["front"].state.feed.close)
        front["server"].should_exit = True
        thread.join(SECONDS)
