"""The page and /metrics on a separate port."""

import asyncio
import json

import pytest

from ...checkpoints.chat_template import PLAIN_STOP, PLAIN_TEMPLATE
from ..testing.inside import LONG, SHORT, error_of, inside, slow, until
from ..testing.loop_clock import forward
from .storm.wire import address_of
from .test_engine_process import BAD, ends_at_bad_tokens

pytestmark = pytest.mark.anyio

PAGE_PATHS = ("/", "/page/page.css", "/metrics")
API_PATHS = ("/v1/models", "/version", "/ping")


async def first_event(client):
    async with client.stream("GET", "/events") as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        return await anext(response.aiter_text())


async def all_events(client):
    """Return the events until the server ends the stream."""
    return (await client.get("/events")).text


async def test_each_port_has_its_own_paths_and_both_have_health(checkpoint):
    async with inside(checkpoint, page_port=0) as server:
        for path in PAGE_PATHS:
            assert (await server.page.get(path)).status_code == 200, path
            error_of(await server.client.get(path), 404)
        for path in API_PATHS:
            assert (await server.client.get(path)).status_code == 200, path
            error_of(await server.page.get(path), 404)
        error_of(await server.client.get("/events"), 404)
        error_of(await server.page.post("/v1/completions", json=SHORT), 404)
        assert '"can_prompt":false' in await first_event(server.page)
        for client in (server.client, server.page):
            assert (await client.get("/health")).status_code == 200
        assert (await server.client.post("/v1/completions", json=SHORT)).status_code == 200
        assert 'vllm:prompt_tokens_total{engine="0"' in (await server.page.get("/metrics")).text


@pytest.mark.parametrize(
    ("template", "can_chat", "stop"),
    [(None, False, []), ("{{ messages[0].content }}", True, []), (PLAIN_TEMPLATE, True, [*PLAIN_STOP])],
)
async def test_page_learns_whether_the_model_can_chat(template, can_chat, stop, checkpoint):
    async with inside(checkpoint, template=template) as server:
        _, data = (await first_event(server.page)).split("\n")[:2]
        description = json.loads(data.removeprefix("data: "))
        assert description["can_prompt"] and (description["can_chat"], description["stop"]) == (can_chat, stop)


async def test_keys_origins_and_timeouts_apply_to_the_page(checkpoint):
    async with inside(checkpoint, page_port=0, api_keys=("key",), header_timeout=100.0) as server:
        error_of(await server.page.get("/events"), 401)
        error_of(await server.page.get("/", headers={"Origin": "http://elsewhere"}), 403)
        own = {"Origin": str(server.page.base_url).rstrip("/")}
        assert (await server.page.get("/", headers=own)).status_code == 200
        reader, writer = await asyncio.open_connection(*address_of(str(server.page.base_url)))
        await server.read(writer, b"GET / HTTP/1.1\r\n")
        forward(110.0)
        assert (await reader.read()).startswith(b"HTTP/1.1 408 ")
        writer.close()


async def test_both_ports_close_together(checkpoint):
    async with inside(checkpoint, slow, page_port=0) as server:
        watching = asyncio.create_task(all_events(server.page))
        running = asyncio.create_task(server.post(**LONG | {"max_tokens": 8}))
        viewers = server.front.state.feed.viewers
        await until(lambda: sum(not each._needs_snapshot for each in viewers) == 1 == server.num_started)  # noqa: SLF001 - what a viewer got
        server.front.stop()
        assert (await running).status_code == 200 and '"snapshot"' in await watching
        assert await server.status == 0


async def test_both_ports_report_a_dead_engine(checkpoint, capfd):
    async with inside(checkpoint, ends_at_bad_tokens, page_port=0) as server:
        assert (await server.post(**SHORT | {"prompt": [1, BAD]})).status_code == 500
        for client in (server.client, server.page):
            assert (await client.get("/health")).status_code == 503
        error_of(await server.page.get("/metrics"), 500)
        assert await server.status == 1
    assert "error: the engine has ended: RuntimeError: the pool is broken" in capfd.readouterr().err
