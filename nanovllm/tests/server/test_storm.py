"""The storms in short: `make storm` has them in full."""

import asyncio

import pytest

from .storm.clients import storm
from .storm.wire import read_answer

HEAD = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
FIRST = b'data: {"choices": [{"index": 0, "text": "Once", "finish_reason": null}]}\n\n'
LAST = b'data: {"choices": [{"index": 0, "text": " upon", "finish_reason": "length"}]}\n\n'
DONE = b"data: [DONE]\n\n"


@pytest.mark.parametrize("num_clients", [24, pytest.param(200, marks=pytest.mark.full)])
def test_half_of_the_clients_hang_up_and_the_others_get_what_they_get_alone(served, num_clients):
    made = asyncio.run(storm(served, num_clients, 1 if num_clients < 100 else 3, 6, 24, seed=1))
    assert made.counts["answered"] * 2 == made.counts.total()


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
