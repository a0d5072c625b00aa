"""Middleware: API keys, origins and hosts of web pages, and request ids."""

import socket

import pytest

from ...server.options import ServerOptions
from ..testing.inside import SHORT, error_of, inside
from ..testing.raw_http import exchange

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


# Hosts

OWN = ("127.0.0.1", "127.0.0.1.", "10.1.2.3", "[::1]", "localhost", "LocalHost", "localhost.", "model.localhost")
FOREIGN = ("evil.com", "gpu-box", "127.0.0.1.evil.com", "localhost.evil.com", "evil.com.", "[::1].evil.com", "0x7f.1")


def as_page(host):
    """Return the headers that a browser sends for a page's own request."""
    return {"Host": host, "Origin": f"http://{host}"}


async def test_page_and_requests_of_pages_need_a_known_host(checkpoint):
    async with inside(checkpoint) as server:
        port = server.client.base_url.port
        for host in [*OWN, *(f"{name}:{port}" for name in OWN), f"{OWN[0]}:80"]:
            assert (await server.client.get("/", headers={"Host": host})).status_code == 200, host
            assert (await server.client.get("/version", headers=as_page(host))).status_code == 200, host
        for host in [*FOREIGN, *(f"{name}:{port}" for name in FOREIGN)]:
            for path in ("/", "/page/page.css", "/events"):
                response = await server.client.get(path, headers={"Host": host})
                assert "--allowed-hosts" in error_of(response, 403)["message"], (host, path)
            response = await server.client.post("/v1/completions", json=SHORT, headers=as_page(host))
            assert "--allowed-hosts" in error_of(response, 403)["message"], host


@pytest.mark.parametrize("options", [{"host": "0.0.0.0"}, {"api_keys": ("key",)}], ids=["all addresses", "a key"])
async def test_programs_may_use_any_host_of_a_server_for_others(checkpoint, options):
    """Probes, scrapers and other containers send no Origin."""
    async with inside(checkpoint, **options) as server:
        headers = {"Host": "nanovllm:8000", "Authorization": "Bearer key"}
        assert (await server.client.post("/v1/completions", json=SHORT, headers=headers)).status_code == 200
        for path in ("/health", "/metrics", "/v1/models"):
            assert (await server.client.get(path, headers=headers)).status_code == 200


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2", "localhost"])
async def test_server_for_this_machine_alone_needs_a_known_host(checkpoint, host):
    """Another site may point its name at this machine, and a browser sends no Origin with that site's GET."""
    async with inside(checkpoint, host=host) as server:
        foreign = {"Host": f"evil.com:{server.client.base_url.port}"}
        assert (await server.client.get("/health", headers=foreign)).status_code == 200
        for path in ("/metrics", "/v1/models", "/version", "/ping", "/health/", "/nowhere"):
            assert "--allowed-hosts" in error_of(await server.client.get(path, headers=foreign), 403)["message"]
            assert (await server.client.get(path)).status_code in (200, 404)
        error_of(await server.client.post("/v1/completions", json=SHORT, headers=foreign), 403)
    async with inside(checkpoint, host=host, allowed_hosts="scraped") as server:
        assert (await server.client.get("/v1/models", headers={"Host": "scraped:80"})).status_code == 200


async def test_page_for_this_machine_alone_needs_a_known_host(checkpoint):
    async with inside(checkpoint, host="0.0.0.0", page_port=0) as server:
        foreign = {"Host": "evil.com"}
        assert (await server.client.get("/v1/models", headers=foreign)).status_code == 200
        error_of(await server.page.get("/metrics", headers=foreign), 403)
        assert (await server.page.get("/health", headers=foreign)).status_code == 200


@pytest.mark.parametrize("root_path", ["/team/llm", "/team/llm/"])
async def test_server_behind_a_proxy_with_a_prefix(checkpoint, root_path):
    """The proxy may remove the prefix, or leave it."""
    async with inside(checkpoint, root_path=root_path, api_keys=("key",)) as server:
        for path in ("/version", "/", "/page/page.css", "/metrics"):
            assert (await server.client.get(f"/team/llm{path}")).status_code == 200
            assert (await server.client.get(path)).status_code == 200
        for path in ("/v1/models", "/team/llm/v1/models", "/team/llm/events"):
            error_of(await server.client.get(path), 401)
        headers = {"Authorization": "Bearer key"}
        assert (await server.client.post("/team/llm/v1/completions", json=SHORT, headers=headers)).status_code == 200
        for path in ("/team/llmx/version", "/team/version", "/team/llm/team/llm/version"):
            assert (await server.client.get(path, headers=headers)).status_code == 404
        pages = [(await server.client.get(path)).text for path in ("/team/llm", "/team/llm/", "/")]
        assert len({*pages}) == 1 and '<base href="/team/llm/">' in pages[0]


async def test_request_without_a_host_is_no_page(checkpoint):
    async with inside(checkpoint) as server:
        url = str(server.client.base_url)
        assert (await exchange(url, b"GET /version HTTP/1.0\r\n\r\n")).status == 200
        refused = await exchange(url, b"GET /events HTTP/1.0\r\n\r\n")
        assert refused.status == 403 and "--allowed-hosts" in refused.error["message"]
        assert (await exchange(url, b"GET /version HTTP/1.1\r\n\r\n")).status == 400


async def test_allowed_hosts_are_known(checkpoint):
    async with inside(checkpoint, allowed_hosts="gpu-box, Models.Example.com") as server:
        for host in ("gpu-box", "GPU-box.:1234", "models.example.com:8000"):
            assert (await server.client.get("/", headers=as_page(host))).status_code == 200
        for host in ("example.com", "evil.models.example.com"):
            error_of(await server.client.get("/", headers=as_page(host)), 403)
    async with inside(checkpoint, allowed_hosts="*") as server:
        assert (await server.client.get("/", headers=as_page("any.com"))).status_code == 200
        error_of(await server.client.get("/", headers={"Host": "any.com", "Origin": "http://evil.com"}), 403)


async def test_the_name_that_the_server_listens_at_is_known(checkpoint, monkeypatch):
    resolve = socket.getaddrinfo
    monkeypatch.setattr(
        "socket.getaddrinfo", lambda name, *a, **b: resolve("127.0.0.1" if "-box" in name else name, *a, **b)
    )
    async with inside(checkpoint, host="gpu-box", page_host="page-box", page_port=0) as server:
        assert (await server.client.get("/version", headers=as_page("gpu-box:8000"))).status_code == 200
        assert (await server.page.get("/", headers=as_page("page-box:9000"))).status_code == 200
        error_of(await server.page.get("/", headers=as_page("other-box:9000")), 403)


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
        *({"root_path": "models"}, {"root_path": "/a b"}, {"root_path": '/"'}),
        *({"allowed_hosts": "http://gpu-box"}, {"allowed_hosts": "*.example.com"}),
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
