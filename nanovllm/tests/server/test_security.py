"""Middleware: API keys, origins of web pages, and request ids."""

import pytest

from ...server.options import ServerOptions
from .inside import SHORT, error_of, inside

pytestmark = pytest.mark.anyio


async def test_api_keys(checkpoint):
    async with inside(checkpoint, api_keys=("first", "second")) as server:
        for given in ("", "Bearer", "Bearer wrong", "Basic first", "first", "Bearer first2", "Bearer \xe9"):
            headers = {"Authorization": given.encode("latin-1")} if given else {}
            response = await server.client.post("/v1/completions", json=SHORT, headers=headers)
            assert error_of(response, 401)["code"] == "invalid_api_key"
            assert response.headers["www-authenticate"] == "Bearer"
        for key in ("first", "second"):
            headers = {"Authorization": f"Bearer {key}"}
            assert (await server.client.post("/v1/completions", json=SHORT, headers=headers)).status_code == 200
        for path in ("/health", "/metrics", "/version"):
            assert (await server.client.get(path)).status_code == 200
        for path in ("/v1/models", "/events", "/nowhere"):
            error_of(await server.client.get(path), 401)


async def post_from(server, origin):
    return await server.client.post("/v1/completions", json=SHORT, headers={"Origin": origin})


async def test_pages_of_other_sites_are_refused(checkpoint):
    async with inside(checkpoint) as server:
        own = str(server.client.base_url).rstrip("/")
        assert (await post_from(server, own)).status_code == 200
        for origin in ("http://elsewhere", "null", "http://[", own + "0"):
            assert "--allowed-origins" in error_of(await post_from(server, origin), 403)["message"]


async def test_pages_of_allowed_sites_are_served(checkpoint):
    async with inside(checkpoint, allowed_origins="http://elsewhere") as server:
        response = await post_from(server, "http://elsewhere")
        assert response.status_code == 200
        assert response.headers["access-control-allow-origin"] == "http://elsewhere"
        error_of(await post_from(server, "http://third"), 403)
        preflight = {"Origin": "http://elsewhere", "Access-Control-Request-Method": "POST"}
        assert (await server.client.options("/v1/completions", headers=preflight)).status_code == 200


async def test_site_that_points_its_name_at_this_machine_is_refused(checkpoint):
    async with inside(checkpoint) as server:
        port, rebound = server.client.base_url.port, {"Host": f"evil.com:{server.client.base_url.port}"}
        own = {"Origin": f"http://evil.com:{port}"}
        error_of(await server.client.post("/v1/completions", json=SHORT, headers=rebound | own), 403)
        error_of(await server.client.get("/events", headers=rebound), 403)
        assert (await server.client.post("/v1/completions", json=SHORT, headers=rebound)).status_code == 200
        for name in ("localhost", "[::1]", "gpu-box"):
            headers = {"Host": f"{name}:{port}", "Origin": f"http://{name}:{port}"}
            assert (await server.client.post("/v1/completions", json=SHORT, headers=headers)).status_code == 200


async def test_each_response_has_a_request_id(checkpoint):
    async with inside(checkpoint) as server:
        client = server.client
        ids = [(await client.get("/health")).headers["x-request-id"] for _ in range(2)]
        assert ids[0] != ids[1] and all(len(each) == 32 for each in ids)
        assert (await client.get("/health", headers={"X-Request-Id": "my-7"})).headers["x-request-id"] == "my-7"
        assert (await client.get("/nowhere", headers={"X-Request-Id": "my-8"})).headers["x-request-id"] == "my-8"
        assert (await client.get("/health", headers={"X-Request-Id": "a b"})).headers["x-request-id"] != "a b"


@pytest.mark.parametrize(
    "options",
    [
        *({"max_num_queued_reqs": -1}, {"max_body_bytes": 0}, {"header_timeout": float("nan")}, {"api_keys": ("",)}),
        *({"page_host": "0.0.0.0"}, {"page_port": 65536}),
    ],
    ids=str,
)
def test_invalid_options_are_named(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        ServerOptions(**options)


def test_page_host_is_this_machine_by_default():
    assert ServerOptions(host="0.0.0.0").page_address is None
    assert ServerOptions(host="0.0.0.0", page_port=9000).page_address == ("127.0.0.1", 9000)
    assert ServerOptions(page_host="::1", page_port=9000).page_address == ("::1", 9000)
