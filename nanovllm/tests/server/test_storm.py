"""The storms in short: `make storm` has them in full."""

import asyncio
import json
import random
import resource
import socket
import time

import httpx
import pytest

from ...engine.config import EngineArgs
from ...engine.llm_engine import LLMEngine
from ...server import addresses
from ...server.engine_client import EngineClient, start_engine
from ...server.options import ServerOptions
from ...server.run import make_front
from .inside import until
from .raw import Raw
from .served import STORYTELLER
from .storm import clients, kills, malformed
from .storm.asks import Judge
from .storm.bad_bodies import whole
from .storm.processes import check_log, storm_server
from .storm.wire import Answer, Ask, address_of, ask_for, read_answer

HEAD = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
FIRST = b'data: {"choices": [{"index": 0, "text": "Once", "finish_reason": null}]}\n\n'
LAST = b'data: {"choices": [{"index": 0, "text": " upon", "finish_reason": "length"}]}\n\n'
DONE = b"data: [DONE]\n\n"


@pytest.mark.parametrize("num_clients", [24, pytest.param(200, marks=pytest.mark.full)])
def test_half_of_the_clients_hang_up_and_the_others_get_what_they_get_alone(served, num_clients):
    made = asyncio.run(clients.storm(served, num_clients, 1 if num_clients < 100 else 3, 6, 24, seed=1))
    assert made.counts["answered"] * 2 == made.counts.total()


def test_malformed_requests_are_told_so_at_once(served):
    requests = malformed.bad_requests(random.Random(1), 150, without=frozenset({"slow"}))
    assert asyncio.run(malformed.storm(served, requests, 150)).faults == []


@pytest.mark.full
def test_malformed_and_slow_requests_beside_a_client_that_is_well(tmp_path):
    with storm_server(tmp_path / "log", *malformed.FLAGS) as server:
        found = asyncio.run(malformed.storm(server, malformed.bad_requests(random.Random(2), 2000), 2000))
        assert found.faults == [] and found.statuses["408"] and found.num_healthy
        assert server.stop() == 0
    check_log(tmp_path / "log")


def test_what_a_storm_calls_a_fault():
    bad = whole("bad", b"{}")
    told = json.dumps({"error": {"message": "no", "type": "x", "param": None, "code": None}}).encode()

    def fault(status, body, seconds=0.1, bad=bad):
        return malformed.fault_of(bad, Raw(b"HTTP/1.1 %d x\r\n\r\n%b" % (status, body), seconds, False))

    assert fault(400, told) is None and fault(400, told, 1.1) == "1.10 seconds"
    assert fault(500, told) == "status 500" and fault(200, told) == "status 200"
    assert fault(400, b"Bad Request").startswith("not in OpenAI's form")
    assert fault(400, told, bad=bad._replace(is_slow=True)) == "status 400"
    assert malformed.fault_of(bad, Raw(b"", 0.1, True)) == "no answer"


@pytest.mark.full
def test_the_engine_is_killed_under_a_client_that_asks_again(served):
    """The front is this process here. The server that the client comes to then is another one."""
    ask = Ask("/v1/completions", '{"prompt": "Once", "max_tokens": 100, "stream": true, "ignore_eos": true}')

    async def scenario():
        args = EngineArgs(model=str(STORYTELLER), offload_policy="load")
        pipe, process = start_engine(args, LLMEngine.from_engine_args)
        engine = EngineClient(pipe, process)
        front = await make_front(str(STORYTELLER), args, ServerOptions(), None, engine)
        with addresses.listening_socket("127.0.0.1", 0) as listener:
            status = asyncio.create_task(front.run(listener))
            await until(lambda: front.is_started)
            half = await ask_for(addresses.address_of(listener), ask, lambda piece: process.kill())
            async with httpx.AsyncClient(base_url=addresses.address_of(listener)) as client:
                assert (await client.get("/health")).status_code == 503
            assert await status == 1
        await engine.close()
        return half

    half = asyncio.run(scenario())
    assert half.texts and not half.is_whole and half.error == "the engine has ended"
    assert asyncio.run(ask_for(served.url, ask)).is_whole


@pytest.mark.full
@pytest.mark.skipif(not hasattr(resource, "prlimit"), reason="Linux has it")
def test_more_clients_than_the_process_may_have_files(tmp_path):
    """They wait until others go. The server says so once, and serves as before."""
    with storm_server(tmp_path / "log") as server:
        most = 64
        resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE, (most, most))
        many = [socket.create_connection(address_of(server.url)) for _ in range(2 * most)]
        time.sleep(1.5)
        for each in many:
            each.close()
        assert server.completion(max_tokens=1) and server.stop() == 0
    told = (tmp_path / "log").read_text().splitlines()
    assert len(told) == 2 and told[1].startswith(f"error: clients wait: this process may have {most} open files")


@pytest.mark.full
def test_both_processes_are_killed_and_start_again(tmp_path):
    counts = asyncio.run(kills.storm(tmp_path, 2, 1))
    assert counts["whole"] and counts["half"] + counts["nothing"]


@pytest.mark.full
def test_an_answer_may_differ_at_a_near_tie_only(served):
    """The judge sees another text: nowhere in it two tokens were as good as equal."""
    ask = Ask("/v1/completions", '{"prompt": "Once", "max_tokens": 16, "stream": true, "temperature": 0, "n": 1}')
    alone = asyncio.run(ask_for(served.url, ask))
    judge = Judge(served.url)
    asyncio.run(judge.judge(ask, alone, alone))
    [(text, reason)] = alone.said.values()
    other = Answer({0: text[:20] + "X" + text[21:]}, {0: reason}, is_done=True)
    with pytest.raises(AssertionError, match="margin"):
        asyncio.run(judge.judge(ask, other, alone))
    assert judge.num_ties == 1


def chunk(data):
    return b"%x\r\n%b\r\n" % (len(data), data)


def test_half_an_answer_is_not_taken_for_whole():
    whole = HEAD + chunk(FIRST) + chunk(LAST) + chunk(DONE) + chunk(b"")
    answer = read_answer(whole)
    assert answer.is_whole and answer.said == {0: ("Once upon", "length")}
    assert not any(read_answer(whole[:end]).is_whole for end in range(len(whole) - 2)), "however much is missing"
    assert not read_answer(HEAD + chunk(FIRST) + chunk(DONE) + chunk(b"")).is_whole, "without a reason"
    assert not read_answer(HEAD + chunk(FIRST) + chunk(LAST) + chunk(b"")).is_whole, "without [DONE]"
    assert read_answer(HEAD + chunk(FIRST) + chunk(b'data: {"error": {"message": "no"}}\n\n')).error == "no"
