"""What stands before the application: keys, origins, limits, request ids."""

import asyncio

import pytest

from ...server import origins
from ...server.limits import check_counts
from ...server.options import ServerOptions
from ...server.requests import parse
from .inside import inside, until
from .test_engine import LONG, slow

SHORT = {"prompt": [5, 6], "max_tokens": 2, "temperature": 0}


def with_server(checkpoint, scenario, prepare=None, **options):
    async def run():
        async with inside(checkpoint, prepare, **options) as server:
            return await scenario(server)

    return asyncio.run(run())


def error_of(response, status):
    assert response.status_code == status, response.text
    value = response.json()
    assert set(value) == {"error"} and set(value["error"]) == {"message", "type", "param", "code"}
    return value["error"]


def test_keys(checkpoint):
    async def scenario(server):
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

    with_server(checkpoint, scenario, api_keys=("first", "second"))


def test_pages_of_other_servers(checkpoint):
    async def asked_by(server, origin, host=None):
        headers = {"Origin": origin} | ({"Host": host} if host else {})
        return await server.client.post("/v1/completions", json=SHORT, headers=headers)

    async def own_only(server):
        own = str(server.client.base_url).rstrip("/")
        assert (await asked_by(server, own)).status_code == 200
        for origin in ("http://elsewhere", "null", "http://[", own + "0"):
            assert "--allowed-origins" in error_of(await asked_by(server, origin), 403)["message"]

    async def one_more(server):
        response = await asked_by(server, "http://elsewhere")
        assert response.status_code == 200
        assert response.headers["access-control-allow-origin"] == "http://elsewhere"
        error_of(await asked_by(server, "http://third"), 403)
        asking = {"Origin": "http://elsewhere", "Access-Control-Request-Method": "POST"}
        assert (await server.client.options("/v1/completions", headers=asking)).status_code == 200

    with_server(checkpoint, own_only)
    with_server(checkpoint, one_more, allowed_origins="http://elsewhere")


def test_origins_that_are_no_list():
    with pytest.raises(ValueError, match="allowed_origins must be a list of texts"):
        origins.read_origins("[1]")
    with pytest.raises(ValueError, match="allowed_origins must be a list of texts"):
        ServerOptions(allowed_origins="[")


def test_request_ids(checkpoint):
    async def scenario(server):
        client = server.client
        ids = [(await client.get("/health")).headers["x-request-id"] for _ in range(2)]
        assert ids[0] != ids[1] and all(len(each) == 32 for each in ids)
        assert (await client.get("/health", headers={"X-Request-Id": "my-7"})).headers["x-request-id"] == "my-7"
        assert (await client.get("/nowhere", headers={"X-Request-Id": "my-8"})).headers["x-request-id"] == "my-8"
        assert (await client.get("/health", headers={"X-Request-Id": "a b"})).headers["x-request-id"] != "a b"

    with_server(checkpoint, scenario)


def test_more_requests_than_may_wait(checkpoint):
    async def scenario(server):
        running = asyncio.create_task(server.post(**LONG, n=3))
        await until(lambda: server.front.state.engine.num_samples == 3)
        response = await server.post(**SHORT, n=2)
        error = error_of(response, 429)
        assert response.headers["retry-after"] == "1" and error["code"] == "rate_limit_exceeded"
        assert error["message"] == "3 requests run or wait, and 2 more would be over max_num_queued_reqs, 4"
        assert (await server.post(**SHORT)).status_code == 200
        assert (await running).status_code == 200
        assert (await server.post(**SHORT, n=2)).status_code == 200 and server.front.state.engine.num_samples == 0
        told = (await server.client.get("/metrics")).text
        assert 'vllm:admission_rejections_total{model_name="' in told
        assert 'reason="max_num_queued_reqs"} 1.0' in told and 'reason="max_num_queued_tokens"} 0.0' in told

    with_server(checkpoint, scenario, slow, max_num_queued_reqs=4)


def test_more_tokens_than_may_wait(checkpoint):
    async def scenario(server):
        engine = server.front.state.engine
        first = asyncio.create_task(server.post(**{**SHORT, "prompt": [5] * 40}))
        await until(lambda: engine.num_requests == 1)
        assert engine.num_waiting_tokens == 40
        error = error_of(await server.post(**SHORT), 429)
        assert error["message"] == "prompts of 40 tokens wait: max_num_queued_tokens is 40"
        assert (await first).status_code == 200
        assert (await server.post(**SHORT)).status_code == 200

    def very_slow(engine):
        slow(engine)
        slow(engine)

    with_server(checkpoint, scenario, very_slow, max_num_queued_tokens=40)


def test_a_request_that_is_too_much_for_one(checkpoint):
    async def scenario(server):
        too_many = error_of(await server.post(**{**SHORT, "n": 3, "max_tokens": 40}), 400)["message"]
        assert too_many == ("the request may come to 126 tokens, prompts and outputs together: this server allows 100")
        assert (await server.post(**{**SHORT, "n": 2, "max_tokens": 40})).status_code == 200
        message = error_of(await server.post(**{**SHORT, "prompt": [[5]] * 50, "n": 50, "max_tokens": 0}), 400)
        assert message["message"]

    with_server(checkpoint, scenario, max_request_tokens=100)


def test_more_choices_than_an_answer_has(checkpoint):
    async def scenario(server):
        error = error_of(await server.post(prompt=[5, 6], max_tokens=1, n=2049), 400)
        assert error["message"] == "the request asks for 2,049 choices: an answer has at most 2,048"

    with_server(checkpoint, scenario)


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({"stop": ["a"] * 33}, "stop has 33 entries: at most 32 are taken"),
        ({"logit_bias": {str(i): 1 for i in range(70_000)}}, "logit_bias has 70,000 entries: at most 65,536 are taken"),
        ({"messages": [{}] * 4097}, "messages has 4,097 entries: at most 4,096 are taken"),
        ({"prompt": ["a"] * 2049}, "the request asks for 2,049 choices: an answer has at most 2,048"),
        ({"structured_outputs": {"regex": "a" * 65_536}}, "structured_outputs has 65,549 characters: at most 65,536"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_body_with_more_than_anybody_needs(body, says):
    with pytest.raises(ValueError, match=says):
        check_counts(body)


def test_the_largest_body_that_anybody_needs():
    check_counts({"stop": ["a"] * 32, "prompt": [5] * 100_000, "messages": [{}] * 4096})


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b'{"a": 1, "b": {"c": 1, "c": 1}}', "the body has 'c' twice in one object"),
        (b"[" * 129 + b"]" * 129, "nested more than 128 levels deep"),
        (b"[" + b"{}," * 32_768 + b"{}]", "the body has 32,770 objects and lists: at most 32,768 are read"),
        (b'{"a": "' + b"[" * 500 + b'"', "the body is no JSON: Expecting ',' delimiter"),
    ],
    ids=["twice", "deep", "many", "brackets in a text"],
)
def test_a_body_that_is_not_read(body, says):
    with pytest.raises(ValueError, match=says):
        parse(body)


@pytest.mark.parametrize(
    "options",
    [{"max_num_queued_reqs": -1}, {"max_body_bytes": 0}, {"header_timeout": float("nan")}, {"api_keys": ("",)}],
)
def test_options_that_cannot_be(options):
    with pytest.raises(ValueError, match=r"must be|is empty"):
        ServerOptions(**options)
