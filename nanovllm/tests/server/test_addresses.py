"""The page and the metrics at an address of their own."""

import asyncio

import pytest

from ...server.options import ServerOptions
from .inside import inside, until
from .raw import exchange
from .test_edge import SHORT, error_of, with_server
from .test_engine import BAD, LONG, ends_at_bad_tokens, slow

OF_THE_PAGE = ("/", "/page/page.css", "/metrics")
OF_CLIENTS = ("/v1/models", "/version", "/ping")


async def first_event(client):
    async with client.stream("GET", "/events") as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        return await anext(response.aiter_text())


async def all_events(client):
    """Until the server has no more."""
    return (await client.get("/events")).text


def test_each_address_has_its_own_and_both_have_health(checkpoint):
    async def scenario(server):
        for path in OF_THE_PAGE:
            assert (await server.page.get(path)).status_code == 200, path
            error_of(await server.client.get(path), 404)
        for path in OF_CLIENTS:
            assert (await server.client.get(path)).status_code == 200, path
            error_of(await server.page.get(path), 404)
        error_of(await server.client.get("/events"), 404)
        error_of(await server.page.post("/v1/completions", json=SHORT), 404)
        assert '"can_prompt": false' in await first_event(server.page), "there is nobody to prompt"
        for client in (server.client, server.page):
            assert (await client.get("/health")).status_code == 200
        assert (await server.client.post("/v1/completions", json=SHORT)).status_code == 200
        assert 'vllm:prompt_tokens_total{engine="0"' in (await server.page.get("/metrics")).text

    with_server(checkpoint, scenario, page_port=0)


def test_keys_origins_and_timeouts_hold_there(checkpoint):
    async def scenario(server):
        error_of(await server.page.get("/events"), 401)
        error_of(await server.page.get("/", headers={"Origin": "http://elsewhere"}), 403)
        own = {"Origin": str(server.page.base_url).rstrip("/")}
        assert (await server.page.get("/", headers=own)).status_code == 200
        assert (await exchange(str(server.page.base_url), b"GET / HTTP/1.1\r\n")).status == 408

    with_server(checkpoint, scenario, page_port=0, api_keys=("key",), header_timeout=0.5)


def test_both_end_together(checkpoint):
    async def scenario():
        async with inside(checkpoint, slow, page_port=0) as server:
            watching = asyncio.create_task(all_events(server.page))
            running = asyncio.create_task(server.post(**LONG | {"max_tokens": 8}))
            viewers = server.front.state.feed.viewers
            await until(lambda: sum(each.num_snapshots for each in viewers) == 1 == server.num_begun)
            server.front.stop()
            assert (await running).status_code == 200 and '"snapshot"' in await watching
            assert await asyncio.wait_for(server.status, 10) == 0

    asyncio.run(scenario())


def test_the_end_of_the_engine_is_told_at_both(checkpoint, capfd):
    async def scenario():
        async with inside(checkpoint, ends_at_bad_tokens, page_port=0) as server:
            assert (await server.post(**SHORT | {"prompt": [1, BAD]})).status_code == 500
            for client in (server.client, server.page):
                assert (await client.get("/health")).status_code == 503
            error_of(await server.page.get("/metrics"), 500)
            assert await asyncio.wait_for(server.status, 10) == 1

    asyncio.run(scenario())
    assert "error: the engine has ended: RuntimeError: the pool is broken" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"page_host": "0.0.0.0"}, "page_host is 0.0.0.0, and page_port is missing"),
        ({"page_port": 65536}, "page_port must be from 0 to 65535, not 65536"),
    ],
)
def test_addresses_that_cannot_be(options, says):
    with pytest.raises(ValueError, match=says):
        ServerOptions(**options)


def test_the_pages_host_is_this_machine_unless_it_is_said():
    assert ServerOptions(host="0.0.0.0").page_address is None
    assert ServerOptions(host="0.0.0.0", page_port=9000).page_address == ("127.0.0.1", 9000)
    assert ServerOptions(page_host="::1", page_port=9000).page_address == ("::1", 9000)
