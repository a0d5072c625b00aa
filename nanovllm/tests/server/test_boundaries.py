"""Limits at their exact values, without a server: the limit itself passes, and one more is refused."""

import json
from collections import Counter
from types import SimpleNamespace

import h11
import pytest

from ...requests.sampling_params import SamplingParams
from ...server import limits
from ...server.bodies import MAX_CHOICES, InvalidRequest
from ...server.engine_process import Add
from ...server.errors import ApiError, as_error, error_object
from ...server.limits import (
    MAX_JSON_PARTS,
    MIN_CHUNK_BYTES,
    CheckedConnection,
    check_json_size,
    check_load,
    check_logprobs,
    check_size,
    last_response,
    max_num_tokens,
)
from ...server.options import ServerOptions

# Bodies

MOST = 1000


def head(**headers):
    lines = [f"{name.replace('_', '-')}: {value}" for name, value in {"host": "localhost", **headers}.items()]
    return "\r\n".join(["POST /v1/completions HTTP/1.1", *lines, "", ""]).encode()


def chunks(*sizes):
    return b"".join(b"%x\r\n%b\r\n" % (size, b" " * size) for size in sizes)


def read_request(connection, data):
    """Feed the bytes of a request. Return the status that refuses it, or None once it is complete."""
    connection.receive_data(data)
    try:
        while not isinstance(connection.next_event(), h11.EndOfMessage):
            pass
    except h11.RemoteProtocolError as error:
        assert connection.error is error
        return error.error_status_hint
    return None


@pytest.mark.parametrize(("size", "status"), [(0, None), (MOST, None), (MOST + 1, 413)])
def test_most_bytes_of_a_body(size, status):
    assert read_request(CheckedConnection(MOST), head(content_length=size) + b" " * size) == status


@pytest.mark.parametrize(
    ("sizes", "status"),
    [
        ([MOST], None),
        ([MOST + 1], 413),
        ([MOST - 500, 500], None),
        ([MOST - 500, 501], 413),
        ([MIN_CHUNK_BYTES + 1] * (MOST // (MIN_CHUNK_BYTES + 1)), None),
    ],
)
def test_most_bytes_of_a_body_in_chunks(sizes, status):
    data = head(transfer_encoding="chunked") + chunks(*sizes) + b"0\r\n\r\n"
    assert read_request(CheckedConnection(MOST), data) == status


@pytest.mark.parametrize(("count", "status"), [(MOST // MIN_CHUNK_BYTES, None), (MOST // MIN_CHUNK_BYTES + 1, 413)])
def test_most_tiny_chunks(count, status):
    connection = CheckedConnection(MOST)
    data = head(transfer_encoding="chunked") + chunks(*[1] * count) + b"0\r\n\r\n"
    assert read_request(connection, data) == status


def test_bodies_of_one_connection_do_not_add_up():
    connection = CheckedConnection(MOST)
    for _ in range(4):
        for data in (head(content_length=MOST) + b" " * MOST, head(transfer_encoding="chunked") + chunks(MOST)):
            data += b"0\r\n\r\n" if b"chunked" in data else b""
            assert read_request(connection, data) is None
            connection.send(h11.Response(status_code=200, headers=[("content-length", "0")]))
            connection.send(h11.EndOfMessage())
            connection.start_next_cycle()


def test_request_with_a_length_and_chunks_is_refused():
    data = head(content_length=2, transfer_encoding="chunked") + b"2\r\n{}\r\n0\r\n\r\n"
    assert read_request(CheckedConnection(MOST), data) == 400


@pytest.mark.parametrize(("count", "is_valid"), [(MAX_JSON_PARTS, True), (MAX_JSON_PARTS + 1, False)])
def test_most_parts_of_a_body(count, is_valid):
    body = b"[" + b"{:" * ((count - 1) // 2) + b"[" * ((count - 1) % 2)
    assert limits.num_parts(body) == count
    in_string = json.dumps({"prompt": '[{":' * MAX_JSON_PARTS}).encode()
    check_json_size(in_string)
    body += b'"[{:"'
    if is_valid:
        check_json_size(body)
        return
    with pytest.raises(InvalidRequest, match=f"{count:,} objects.* {MAX_JSON_PARTS:,} are allowed"):
        check_json_size(body)


# Sizes of requests


def request(num_tokens=4, **params):
    return Add("a", [5] * num_tokens, SamplingParams(**{"max_tokens": 6} | params), None)


def embedding_request(num_tokens):
    add = request(num_tokens)
    add.params.max_tokens = 0
    return add


def error_of(requests, max_model_len=100, **options):
    try:
        check_size(requests, ServerOptions(**options), max_model_len)
    except InvalidRequest as error:
        return error.param, error.code
    return None


def test_most_choices():
    assert error_of([request(1, n=MAX_CHOICES - 1, max_tokens=1), request(1, max_tokens=1)]) is None
    assert error_of([request(1, n=MAX_CHOICES, max_tokens=1), request(1, max_tokens=1)]) == ("n", None)


def test_longest_prompt():
    too_long = ("prompt", "context_length_exceeded")
    assert error_of([request(99)]) is None and error_of([request(100)]) == too_long
    assert error_of([request(1), request(100)]) == too_long
    assert error_of([embedding_request(100)]) is None and error_of([embedding_request(101)]) == too_long


def test_most_tokens_of_a_request():
    requests = [request(4, n=3, max_tokens=6), request(2, n=3, max_tokens=6)]  # 3 * (4 + 6) + 3 * (2 + 6)
    assert error_of(requests, max_request_tokens=54) is None
    assert error_of(requests, max_request_tokens=53) == ("max_tokens", None)
    assert error_of(requests, max_request_tokens=None) is None


@pytest.mark.parametrize(("max_tokens", "expected"), [(6, 10), (96, 100), (97, 100), (None, 100), (1, 5)])
def test_most_tokens_of_a_sample(max_tokens, expected):
    assert max_num_tokens(request(4, max_tokens=max_tokens), 100) == expected


@pytest.mark.parametrize("name", ["logprobs", "prompt_logprobs"])
@pytest.mark.parametrize(
    ("most", "count", "is_valid"),
    [
        (5, 0, True),
        (5, 5, True),
        (5, 6, False),
        (5, -1, False),
        (0, 0, True),
        (0, 1, False),
        (-1, 6, True),
        (-1, -1, True),
    ],
)
def test_most_logprobs(name, most, count, is_valid):
    params, options = SamplingParams(**{name: count}), ServerOptions(max_logprobs=most)
    if is_valid:
        check_logprobs(params, options)
        return
    with pytest.raises(InvalidRequest, match=f"max_logprobs is {most}, but got {count}") as caught:
        check_logprobs(params, options)
    assert caught.value.param == name


# The load


@pytest.mark.parametrize(
    ("options", "num_samples", "num_waiting_tokens", "limit"),
    [
        ({}, 10**6, 10**6, None),
        ({"max_num_queued_reqs": 10}, 7, 0, None),
        ({"max_num_queued_reqs": 10}, 8, 0, "max_num_queued_reqs"),
        ({"max_num_queued_reqs": 0}, 0, 0, "max_num_queued_reqs"),
        ({"max_num_queued_tokens": 40}, 0, 39, None),
        ({"max_num_queued_tokens": 40}, 0, 40, "max_num_queued_tokens"),
        ({"max_num_queued_tokens": 0}, 0, 0, "max_num_queued_tokens"),
        ({"max_num_queued_reqs": 10, "max_num_queued_tokens": 40}, 8, 40, "max_num_queued_reqs"),
        ({"max_num_queued_reqs": 10, "max_num_queued_tokens": 40}, 7, 40, "max_num_queued_tokens"),
    ],
)
def test_most_load(options, num_samples, num_waiting_tokens, limit):
    load, rejections = SimpleNamespace(num_samples=num_samples, num_waiting_tokens=num_waiting_tokens), Counter()
    requests = [request(n=2), request()]
    if limit is None:
        check_load(requests, ServerOptions(**options), load, rejections)
        assert not rejections
        return
    for count in (1, 2):
        with pytest.raises(ApiError, match=limit) as caught:
            check_load(requests, ServerOptions(**options), load, rejections)
        assert caught.value.status == 429 and rejections == {limit: count}


# Errors


@pytest.mark.parametrize(
    ("status", "kind", "code"),
    [
        (400, "invalid_request_error", None),
        (401, "invalid_request_error", "invalid_api_key"),
        (404, "invalid_request_error", "not_found"),
        (428, "invalid_request_error", None),
        (429, "rate_limit_error", "rate_limit_exceeded"),
        (499, "invalid_request_error", None),
        (500, "server_error", None),
        (503, "server_error", None),
    ],
)
def test_type_and_code_of_an_error(status, kind, code):
    assert error_object(status, "No.") == {"error": {"message": "No.", "type": kind, "param": None, "code": code}}
    assert error_object(status, "No.", "n", "own")["error"]["code"] == "own"
    assert as_error(ApiError("No.", status)) == (status, error_object(status, "No."))


def test_unexpected_error_hides_its_text():
    assert as_error(KeyError("/home/secret"))[0] == 500 and "secret" not in str(as_error(KeyError("/home/secret")))
    assert as_error(ValueError("n is 0")) == (400, error_object(400, "n is 0"))


def test_last_response_is_whole():
    head, _, body = last_response(413, "Too long: é.").partition(b"\r\n\r\n")
    lines = head.split(b"\r\n")
    assert lines[0].startswith(b"HTTP/1.1 413 ") and b"Content-Length: %d" % len(body) in lines
    assert b"Connection: close" in lines and json.loads(body) == error_object(413, "Too long: é.")
