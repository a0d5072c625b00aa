"""The health check: an engine that has work and makes no progress is stuck."""

import asyncio
import threading
import time
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest

from ...llm_engine import LLMEngine
from ...options.engine_args import EngineArgs
from ...server.engine_client import EngineClient, start_engine
from ...server.options import ServerOptions
from ...server.run import address_of, listening_sockets, make_api_server
from ..testing.inside import LONG, SHORT, ThreadAsProcess, error_of, inside, until

pytestmark = pytest.mark.anyio
GUARD = 120.0  # seconds


class Held:
    """A place in an engine where its thread stops, on a clock that tests set."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.is_reached, self.may_go = threading.Event(), threading.Event()

    def reach(self) -> None:
        self.is_reached.set()
        assert self.may_go.wait(GUARD)


@asynccontextmanager
async def holding(checkpoint, prepare):
    """Run a server, and a request until its engine stops in a place that `prepare` has made."""
    held = Held()
    options = {"clock": lambda: held.now, "attention_backend": "torch"}
    async with inside(checkpoint, lambda engine: prepare(engine, held), **options) as server:
        request = asyncio.create_task(server.post(**SHORT))
        await until(held.is_reached.is_set, GUARD)
        try:
            yield server, held
        finally:
            held.may_go.set()
            assert (await request).status_code == 200
        await until(lambda: server.front.state.engine.stalled_seconds == 0)
        assert (await server.client.get("/health")).status_code == 200


def hold_in_a_step(engine, held):
    schedule = engine.scheduler.schedule

    def hold_and_schedule():
        held.reach()
        return schedule()

    engine.scheduler.schedule = hold_and_schedule


async def test_engine_that_is_stuck_in_a_step_is_unhealthy_until_it_goes_on(checkpoint):
    async with holding(checkpoint, hold_in_a_step) as (server, held):
        held.now += 300
        assert (await server.client.get("/health")).status_code == 200
        held.now += 1
        for path in ("/health", "/ping"):
            message = error_of(await server.client.get(path), 503)["message"]
            assert "301 seconds" in message and message.count(".") == 1, "one sentence"


async def test_an_idle_engine_is_healthy_forever(checkpoint):
    now = 0.0
    async with inside(checkpoint, clock=lambda: now) as server:
        for _ in range(2):
            now += 1e6
            await until(lambda: server.front.state.engine.stalled_seconds == 0)  # the last step may just have ended
            assert (await server.client.get("/health")).status_code == 200
            assert (await server.post(**SHORT)).status_code == 200


async def test_each_layer_of_a_step_is_progress(checkpoint):
    def hold_after_slow_layers(engine, held):
        layers = engine.executor.model.model.layers

        def pass_time(*args):
            held.now += 200

        for layer in layers:
            layer.register_forward_hook(pass_time)
        layers[-1].register_forward_hook(lambda *args: held.reach())

    async with holding(checkpoint, hold_after_slow_layers) as (server, held):
        assert held.now >= 1400, "the step has taken longer than an engine may be stuck"
        assert (await server.client.get("/health")).status_code == 200
        held.now += 200
        error_of(await server.client.get("/health"), 503)
        held.now -= 200


async def test_waiting_for_compiled_kernels_is_progress(checkpoint):
    def hold_at_the_switch(engine, held):
        engine.kernels.switch_when_ready = held.reach

    async with holding(checkpoint, hold_at_the_switch) as (server, held):
        held.now += 1e6
        assert (await server.client.get("/health")).status_code == 200


async def test_stopping_server_ends_a_stuck_engine_without_waiting_for_its_requests(checkpoint, monkeypatch):
    killed = []
    held = Held()
    monkeypatch.setattr(ThreadAsProcess, "kill", lambda thread: (killed.append(thread), held.may_go.set()))
    options = {"clock": lambda: held.now, "shutdown_timeout": 1e6}
    async with inside(checkpoint, lambda engine: hold_in_a_step(engine, held), **options) as server:
        request = asyncio.create_task(server.post(**SHORT))
        await until(held.is_reached.is_set, GUARD)
        scrape = asyncio.create_task(server.client.get("/metrics"))
        held.now += 301
        assert (await server.client.get("/health")).status_code == 503
        server.front.stop()
        assert "shutting down" in error_of(await request, 503)["message"]
        error_of(await scrape, 503)
        assert await asyncio.wait_for(server.status, GUARD) == 0
        assert len(killed) == 1


def build_stuck(args: EngineArgs) -> LLMEngine:
    """Return an engine whose first step says so in a file, and never ends."""
    engine = LLMEngine.from_engine_args(args)

    def stick():
        Path(args.download_dir, "stuck").touch()
        threading.Event().wait()

    engine.step = stick  # type: ignore[method-assign]
    return engine


@pytest.mark.full
async def test_process_of_a_stuck_engine_is_killed(checkpoint, tmp_path):
    args = EngineArgs(model=str(checkpoint), offload_policy="load", download_dir=str(tmp_path))
    options = ServerOptions(port=0, shutdown_timeout=1e6)
    pipe, process, progress = start_engine(args, build_stuck)
    ahead = 0.0
    engine = EngineClient(pipe, process, progress, lambda: time.monotonic() + ahead)
    front = await make_api_server(str(checkpoint), args, options, None, engine)
    with listening_sockets(options) as listeners:
        status = asyncio.create_task(front.run(*listeners))
        await until(lambda: all(server.started for server in front.servers), GUARD)
        async with httpx.AsyncClient(base_url=address_of(listeners[0]), timeout=GUARD) as client:
            request = asyncio.create_task(client.post("/v1/completions", json=LONG))
            await until((tmp_path / "stuck").exists, GUARD)
            ahead = 301.0
            assert (await client.get("/health")).status_code == 503
            front.stop()
            error_of(await request, 503)
            assert await asyncio.wait_for(status, GUARD) == 0
    await asyncio.to_thread(process.join, GUARD)
    assert process.exitcode == -9
    await engine.close()
