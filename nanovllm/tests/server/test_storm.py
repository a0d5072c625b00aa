"""Short storms. `make storm` runs them at full size."""

import asyncio
import json
import random

import httpx
import pytest

from ...llm_engine import LLMEngine
from ...options.engine_args import EngineArgs
from ...server.engine_client import EngineClient, start_engine
from ...server.options import ServerOptions
from ...server.run import address_of as url_of
from ...server.run import listening_socket, make_api_server
from ..testing.inside import until
from ..testing.raw_http import Raw
from ..testing.served import STORYTELLER
from .storm import clients, kills, malformed
from .storm.bad_bodies import whole
from .storm.judge import Judge
from .storm.processes import check_log, storm_server
from .storm.wire import StreamRequest, StreamResult, read_stream, send_and_read

HEAD = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
FIRST = b'data: {"choices": [{"index": 0, "text": "Once", "finish_reason": null}]}\n\n'
LAST = b'data: {"choices": [{"index": 0, "text": " upon", "finish_reason": "length"}]}\n\n'
DONE = b"data: [DONE]\n\n"


@pytest.mark.parametrize("num_clients", [24, pytest.param(200, marks=pytest.mark.nightly)])
@pytest.mark.full
def test_clients_that_stay_get_the_same_text_while_half_hang_up(served, num_clients):
    result = asyncio.run(clients.storm(served, num_clients, 1 if num_clients < 100 else 3, 6, 24, seed=1))
    assert result.counts["answered"] * 2 == result.counts.total()


def test_malformed_requests_get_an_error_at_once(served, monkeypatch):
    monkeypatch.setattr(malformed, "SECONDS", 60.0)  # other tests run beside this one
    monkeypatch.setattr(malformed, "MAX_GAP", 60.0)
    requests = malformed.bad_requests(random.Random(1), 150, without=frozenset({"slow"}))
    assert asyncio.run(malformed.storm(served, requests, 150)).faults == []


@pytest.mark.nightly
def test_healthy_client_beside_malformed_and_slow_requests(tmp_path):
    with storm_server(tmp_path / "log", *malformed.FLAGS) as server:
        findings = asyncio.run(malformed.storm(server, malformed.bad_requests(random.Random(2), 2000), 2000))
        assert findings.faults == [] and findings.statuses["408"] and findings.num_healthy
        assert server.stop() == 0
    check_log(tmp_path / "log")


def test_faults_of_responses():
    bad = whole("bad", b"{}")
    error = json.dumps({"error": {"message": "no", "type": "x", "param": None, "code": None}}).encode()

    def fault(status, body, seconds=0.1, bad=bad):
        return malformed.fault_of(bad, Raw(b"HTTP/1.1 %d x\r\n\r\n%b" % (status, body), seconds, False))

    assert fault(400, error) is None and fault(400, error, 1.1) == "1.10 seconds"
    assert fault(500, error) == "status 500" and fault(200, error) == "status 200"
    assert fault(400, b"Bad Request").startswith("not in OpenAI's form")
    assert fault(400, error, bad=bad._replace(is_slow=True)) == "status 400"
    assert malformed.fault_of(bad, Raw(b"", 0.1, True)) == "no response"


@pytest.mark.full
def test_client_retries_after_the_engine_is_killed(served):
    """The front is this process. The client retries at another server."""
    request = StreamRequest(
        "/v1/completions", '{"prompt": "Once", "max_tokens": 100, "stream": true, "ignore_eos": true}'
    )

    async def scenario():
        args = EngineArgs(model=str(STORYTELLER), offload_policy="load")
        pipe, process, progress = start_engine(args, LLMEngine.from_engine_args)
        engine = EngineClient(pipe, process, progress)
        front = await make_api_server(str(STORYTELLER), args, ServerOptions(), None, engine)
        with listening_socket("127.0.0.1", 0) as listener:
            status = asyncio.create_task(front.run(listener))
            await until(lambda: all(server.started for server in front.servers))
            half = await send_and_read(url_of(listener), request, lambda piece: process.kill())
            async with httpx.AsyncClient(base_url=url_of(listener)) as client:
                assert (await client.get("/health")).status_code == 503
            assert await status == 1
        await engine.close()
        return half

    half = asyncio.run(scenario())
    assert half.texts and not half.is_whole and half.error == "The engine has ended."
    assert asyncio.run(send_and_read(served.url, request)).is_whole


@pytest.mark.nightly
def test_both_processes_are_killed_and_restarted(tmp_path):
    counts = asyncio.run(kills.storm(tmp_path, 2, 1))
    assert counts["whole"] and counts["half"] + counts["nothing"]


@pytest.mark.full
def test_judge_refuses_another_text_without_a_tie(served):
    request = StreamRequest(
        "/v1/completions", '{"prompt": "Once", "max_tokens": 16, "stream": true, "temperature": 0, "n": 1}'
    )
    expected = asyncio.run(send_and_read(served.url, request))
    judge = Judge(served.url)
    asyncio.run(judge.judge(request, expected, expected))
    [(text, reason)] = expected.outputs.values()
    other = StreamResult({0: text[:20] + "X" + text[21:]}, {0: reason}, is_done=True)
    with pytest.raises(AssertionError, match="margin"):
        asyncio.run(judge.judge(request, other, expected))
    assert judge.num_ties == 1


def chunk(data):
    return b"%x\r\n%b\r\n" % (len(data), data)


def test_incomplete_stream_is_not_whole():
    whole = HEAD + chunk(FIRST) + chunk(LAST) + chunk(DONE) + chunk(b"")
    result = read_stream(whole)
    assert result.is_whole and result.outputs == {0: ("Once upon", "length")}
    assert not any(read_stream(whole[:end]).is_whole for end in range(len(whole) - 2)), "it lacks a part"
    assert not read_stream(HEAD + chunk(FIRST) + chunk(DONE) + chunk(b"")).is_whole, "without a finish reason"
    assert not read_stream(HEAD + chunk(FIRST) + chunk(LAST) + chunk(b"")).is_whole, "without [DONE]"
    assert read_stream(HEAD + chunk(FIRST) + chunk(b'data: {"error": {"message": "no"}}\n\n')).error == "no"
