"""Requests in the engine's process: hang-ups, steps that raise, an engine that dies, a server that stops."""

import asyncio
import json
from multiprocessing import Pipe

import httpx
import pytest

from ...llm_engine import LLMEngine
from ...server.app import make_apps
from ...server.engine_client import EngineClient, RunningRequests
from ...server.engine_process import Delta, Piece, Ready, Stop, receive, send
from ..testing.inside import LONG, ThreadAsProcess, inside, slow, until
from ..testing.loop_clock import forward, turn

pytestmark = pytest.mark.anyio

BAD = 7  # a token that makes a step raise


def fails_at_bad_tokens(engine: LLMEngine) -> None:
    launch = engine.executor.launch

    def launch_or_raise(batch, *numbers):
        if any(BAD in seq.token_ids for seq, _ in batch):
            raise RuntimeError("no such file: /home/somebody/secret")
        return launch(batch, *numbers)

    engine.executor.launch = launch_or_raise  # type: ignore[method-assign]


def ends_at_bad_tokens(engine: LLMEngine) -> None:
    schedule = engine.scheduler.schedule

    def schedule_or_raise():
        if any(BAD in seq.token_ids for seq in engine.scheduler.waiting):
            raise RuntimeError("the pool is broken")
        return schedule()

    engine.scheduler.schedule = schedule_or_raise  # type: ignore[method-assign]


async def chunks_of(response):
    """Return the data of its events."""
    lines = [line.removeprefix("data: ") async for line in response.aiter_lines() if line]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]


async def streamed(server, **body):
    async with server.client.stream("POST", "/v1/completions", json={**LONG, "stream": True, **body}) as response:
        assert response.status_code == 200
        return await chunks_of(response)


@pytest.mark.parametrize("is_stream", [False, True])
async def test_hang_up_aborts_a_request_and_frees_its_blocks(checkpoint, is_stream):
    async with inside(checkpoint, slow) as server:
        request = asyncio.create_task(server.post(**LONG, n=3, stream=is_stream))
        await until(lambda: server.engine.stats().blocks_running > 0)
        generated = server.engine.stats().generation_tokens
        request.cancel()
        await until(lambda: server.is_empty)
        assert server.engine.stats().generation_tokens - generated <= 3 * 5, (
            "aborted within a few steps, not after all 50"
        )
        assert server.engine.tally.ended == {"abort": 3}
        assert server.front.state.engine.num_requests == server.front.state.engine.num_waiting_tokens == 0
        assert (await server.post(**LONG)).status_code == 200


async def test_exception_in_a_step_ends_only_the_request_that_caused_it(checkpoint, capfd):
    async with inside(checkpoint, fails_at_bad_tokens) as server:
        alone = (await server.post(**LONG)).json()["choices"]
        good, stream, bad = await asyncio.gather(
            server.post(**LONG), streamed(server), server.post(**LONG | {"prompt": [1, BAD]})
        )
        assert good.json()["choices"] == alone
        assert "".join(chunk["choices"][0]["text"] for chunk in stream[:-1]) == alone[0]["text"]
        assert bad.status_code == 500
        error = bad.json()["error"]
        assert (error["type"], error["message"]) == ("server_error", "The request failed: RuntimeError.")
        assert server.is_empty and (await server.client.get("/health")).status_code == 200
    assert "RuntimeError: no such file: /home/somebody/secret" in capfd.readouterr().err


async def test_exception_while_a_request_is_added_ends_only_that_request(checkpoint, capfd):
    def refuses_bad_tokens(engine):
        process = engine.input_processor.process

        def process_or_panic(request_id, prompt, *rest):
            if BAD in prompt:
                raise Panic("no such file: /home/somebody/secret")
            return process(request_id, prompt, *rest)

        engine.input_processor.process = process_or_panic

    class Panic(BaseException):
        """An exception like those of Rust libraries."""

    async with inside(checkpoint, refuses_bad_tokens) as server:
        good, bad = await asyncio.gather(server.post(**LONG), server.post(**LONG | {"prompt": [1, BAD]}))
        assert (good.status_code, bad.status_code) == (200, 500)
        assert bad.json()["error"]["message"] == "The request failed: Panic."
        assert server.is_empty and (await server.client.get("/health")).status_code == 200
    assert "Panic: no such file: /home/somebody/secret" in capfd.readouterr().err


async def test_broken_stream_ends_with_an_error_instead_of_done(checkpoint):
    def fails_at_the_third_token(engine):
        launch = engine.executor.launch

        def launch_or_raise(batch, *numbers):
            if any(seq.num_tokens - seq.num_prompt_tokens == 3 for seq, _ in batch):
                raise RuntimeError("out of luck")
            return launch(batch, *numbers)

        engine.executor.launch = launch_or_raise

    async with inside(checkpoint, fails_at_the_third_token) as server:
        *chunks, last = await streamed(server)
        assert len(chunks) >= 1 and all(chunk["choices"][0]["finish_reason"] is None for chunk in chunks)
        assert last["error"]["message"] == "The request failed: RuntimeError."


async def test_dead_engine_is_reported_to_all_and_ends_the_front(checkpoint, capfd):
    async with inside(checkpoint, lambda engine: (slow(engine), ends_at_bad_tokens(engine))) as server:
        stream, whole = asyncio.create_task(streamed(server)), asyncio.create_task(server.post(**LONG))
        await until(lambda: server.num_started == 2)
        bad = await server.post(**LONG | {"prompt": [1, BAD]})
        errors = (bad.json(), (await whole).json(), (await stream)[-1])
        assert bad.status_code == (await whole).status_code == 500
        assert all(each["error"]["message"] == "The engine has ended." for each in errors)
        assert (await server.client.get("/health")).status_code == 503
        assert (await server.post(**LONG)).status_code == 500
        assert await server.status == 1
    assert "error: the engine has ended: RuntimeError: the pool is broken" in capfd.readouterr().err


async def test_stopping_server_refuses_new_requests_and_finishes_running_ones(checkpoint):
    async with inside(checkpoint, slow) as server:
        stream = asyncio.create_task(streamed(server))
        await until(lambda: server.num_started == 1)
        server.front.stop()
        app = httpx.ASGITransport(make_apps(server.front.state)[0])  # uvicorn closes the port within 0.1 seconds
        async with httpx.AsyncClient(transport=app, base_url="http://localhost") as client:
            refused = await client.post("/v1/completions", json=LONG)
        assert refused.status_code == 503 and "shutting down" in refused.json()["error"]["message"]
        *_, last, done = await stream
        assert (last["choices"][0]["finish_reason"], done) == ("length", "[DONE]")
        assert await server.status == 0


@pytest.mark.parametrize("how", ["timeout", "again"])
async def test_requests_that_outlast_the_timeout_end_with_an_error(checkpoint, how):
    async with inside(checkpoint, slow, shutdown_timeout=100.0) as server:
        stream, whole = asyncio.create_task(streamed(server)), asyncio.create_task(server.post(**LONG))
        await until(lambda: server.num_started == 2)
        server.front.stop()
        if how == "again":
            server.front.stop()
        else:
            await turn()
            forward(110.0)
        assert (await stream)[-1]["error"]["message"] == "The server is shutting down."
        assert (await whole).status_code == 503
        assert await server.status == 0
        await until(lambda: server.is_empty)


async def test_bad_checkpoint_is_reported_before_the_server_starts(tmp_path):
    with pytest.raises(ValueError, match="is not a checkpoint folder"):
        async with inside(tmp_path):
            pass


async def test_closed_client_no_longer_reads_from_its_pipe():
    """Another client's pipe may get the same file descriptor, and would have two readers."""
    pipe, engines_end = Pipe()

    def serve_nothing() -> None:
        send(engines_end, Ready(64, "none"))
        assert isinstance(receive(engines_end), Stop)

    with pipe, engines_end:
        engine = ThreadAsProcess(target=serve_nothing, daemon=True)
        engine.start()
        client = EngineClient(pipe, engine)
        await client.ready()
        await client.close()
        assert not asyncio.get_running_loop().remove_reader(pipe.fileno())


async def test_slow_reader_gets_merged_deltas():
    def delta(text, token, reason=None):
        return Delta("a", [Piece(0, text, [token], None, reason, None)], reason is not None, 4)

    running = RunningRequests(1, {}, lambda delta: False)
    for each in (delta("on", 1), delta("ce", 2), delta(" upon", 3, "length")):
        running.put(each)
    [merged] = await running.get()
    assert merged == Delta("a", [Piece(0, "once upon", [1, 2, 3], None, "length", None)], True, 4)
    running.fail(ValueError("no"))
    with pytest.raises(ValueError, match="no"):
        await running.get()


class Compiled:
    """Kernels that have been compiled, and are used once no request is running."""

    description, awaits_idle = "plain operations", True

    def __init__(self, engine: LLMEngine) -> None:
        self.engine = engine
        self.num_met: int | None = None  # running requests when it switched

    def switch_when_ready(self) -> None:
        if self.awaits_idle:
            self.description, self.awaits_idle, self.num_met = "kernels", False, len(self.engine.requests)

    def close(self) -> None:
        pass


async def test_busy_server_switches_to_compiled_kernels(checkpoint, capfd):
    """New requests wait until the running ones have ended, unless their clients hang up."""
    async with inside(checkpoint, slow) as server:
        running = asyncio.create_task(server.post(**LONG))
        await until(lambda: server.num_started == 1)
        server.engine.kernels = kernels = Compiled(server.engine)
        held = [asyncio.create_task(server.post(**LONG)) for _ in range(3)]
        await until(lambda: server.front.state.engine.num_requests == 4)
        held[0].cancel()
        assert server.num_started == 1 and not running.done()
        texts = [(await each).json()["choices"][0]["text"] for each in (running, *held[1:])]
        assert kernels.num_met == 0 and len(set(texts)) == 1
        await until(lambda: server.is_empty)
    assert "kernels\n" in capfd.readouterr().err
