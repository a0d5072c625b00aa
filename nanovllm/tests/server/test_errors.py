"""Errors over HTTP: each is in OpenAI's form and gives the reason."""

import pytest

from ..testing.inside import error_of
from ..testing.served import CLIENT, stream


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        ({}, 400, "Missing required parameter: 'prompt'."),
        ({"prompt": ""}, 400, "the prompt is empty"),
        ({"prompt": []}, 400, "the prompt is empty"),
        ({"prompt": [1 << 40]}, 400, "1099511627776"),
        ({"prompt": "a", "temperature": "hot"}, 400, "Invalid 'temperature'"),
        ({"prompt": "a", "max_tokens": 0}, 400, "max_tokens must be "),
        ({"prompt": "a", "n": 0}, 400, "n must be "),
        ({"prompt": "a", "seed": 1 << 70}, 400, "seed must be "),
        ({"prompt": "a", "temperature": 10**400}, 400, "temperature"),
        ({"prompt": "a", "stop": [""]}, 400, "stop must be "),
        ({"prompt": "a", "logit_bias": {"9999": 1}}, 400, "logit_bias"),
        ({"prompt": "a", "structured_outputs": {"regex": "("}}, 400, "structured_outputs"),
        ({"prompt": "a", "n": 5000}, 400, "5,000 choices"),
        ({"prompt": "a", "repetition_penalty": 1e-300}, 400, "repetition_penalty must be "),
        ({"prompt": "a", "logprobs": -1}, 400, "logprobs"),
        ({"prompt": "a", "logprobs": 21}, 400, "this server's max_logprobs is 20, but got 21"),
        ({"prompt": [5] * 1024}, 400, "maximum context length is 1024 tokens. However, your prompt has 1024 tokens"),
        ({"prompt": "a", "model": "gpt-4"}, 404, "The model `gpt-4` does not exist. This server has `storyteller`"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_request_that_cannot_be_served(served, body, status, message):
    error = error_of(served.post("/v1/completions", **body), status)
    assert error["type"] == "invalid_request_error" and message in error["message"]


@pytest.mark.parametrize(
    "constraints",
    [
        {"allowed_token_ids": [500], "bad_words": [" wor"]},
        {"allowed_token_ids": [500, 501], "structured_outputs": {"regex": "[0-9]"}},
        {"allowed_token_ids": [2], "min_tokens": 2},
    ],
    ids=" and ".join,
)
def test_constraints_that_leave_no_token_are_the_clients_error(served, constraints):
    for body in ({"n": 2}, {"stream": True}, {"prompt": ["a", "b"]}):
        error = error_of(served.post("/v1/completions", **{"prompt": "a"} | body, **constraints), 400)
        assert error["type"] == "invalid_request_error" and "no token is left to sample from" in error["message"]
    assert "no token is left" in error_of(served.post("/v1/responses", input="a", **constraints), 400)["message"]


def test_constraints_that_leave_no_second_token_are_the_clients_error(served):
    constraints = {"prompt": "a", "allowed_token_ids": [500], "bad_words": [" wor wor"]}
    assert "no token is left" in error_of(served.post("/v1/completions", **constraints), 400)["message"]
    first, last = stream(served, "/v1/completions", **constraints)
    assert first["choices"][0]["text"] == " wor" and last["error"]["type"] == "invalid_request_error"


def test_param_and_code_are_the_ones_that_clients_know(served):
    error = error_of(served.post("/v1/chat/completions", messages=[{"role": "user", "content": "a"}], model=5), 400)
    assert (error["param"], error["code"]) == ("model", "invalid_type")
    error = error_of(served.post("/v1/responses", input="a", model="gpt-4"), 404)
    assert (error["param"], error["code"]) == ("model", "model_not_found")
    error = error_of(served.post("/v1/responses", input="a " * 1500), 400)
    assert error["code"] == "context_length_exceeded"


@pytest.mark.parametrize("kind", ["", "text/plain", "application/x-www-form-urlencoded"])
def test_body_must_be_declared_as_json(served, kind):
    headers = {"Content-Type": kind} if kind else {}
    response = CLIENT.post(f"{served.url}/v1/completions", content=b'{"prompt": "a"}', headers=headers)
    assert "application/json" in error_of(response, 415)["message"]


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        *[("POST", path, 404) for path in ("/v1/audio/speech", "/v1/audio/transcriptions", "/v1/images", "/x")],
        *[("GET", path, 404) for path in ("/v1/responses/resp_1", "/v1/models/gpt-4", "/v1/completions/", "//")],
        *[("GET", path, 405) for path in ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/tokenize")],
        *[("PUT", "/v1/completions", 405), ("DELETE", "/v1/models/storyteller", 405), ("POST", "/v1/models", 405)],
    ],
)
def test_unknown_path_or_method(served, method, path, status):
    response = CLIENT.request(method, served.url + path)
    assert error_of(response, status)["message"]
    assert ("allow" in response.headers) == (status == 405)


def test_large_bodies_are_served(served):
    """Each body has as many entries as it can hold."""
    many = list(range(4096)) * 15
    assert served.completion(stop_token_ids=many, max_tokens=1, ignore_eos=True)
    assert served.completion(max_tokens=1, **{"x" * 1_000_000: 1})
