"""Errors over HTTP: each is in OpenAI's form and gives the reason."""

from typing import Any

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


MESSAGES = {"messages": [{"role": "user", "content": "a"}]}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "a"},
    "/v1/chat/completions": MESSAGES,
    "/v1/responses": {"input": "a"},
}
RANGES = {
    **{"temperature": -1, "top_p": 0, "top_k": -2, "min_p": 2, "presence_penalty": 3, "frequency_penalty": -3},
    **{"repetition_penalty": 0, "seed": 1 << 70, "stop": [""], "stop_token_ids": [1 << 40], "min_tokens": -1},
    **{"logit_bias": {"9999": 1}, "allowed_token_ids": [-1], "bad_words": [""]},
}


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("field", RANGES)
def test_range_error_names_the_field(served, path, field):
    error = error_of(served.post(path, **BODIES[path], **{field: RANGES[field]}), 400)
    assert error["param"] == field and error["message"]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/completions", {"prompt": "a", "max_tokens": 0}, "max_tokens"),
        ("/v1/completions", {"prompt": "a", "max_tokens": 0, "stream": True}, "max_tokens"),
        ("/v1/completions", {"prompt": "a", "max_tokens": 1 << 62, "n": 2000}, "max_tokens"),
        ("/v1/completions", {"prompt": "a", "n": 0}, "n"),
        ("/v1/completions", {"prompt": "a", "n": 5000}, "n"),
        ("/v1/completions", {"prompt": "a", "logprobs": 21}, "logprobs"),
        ("/v1/completions", {"prompt": "a", "logprobs": -1}, "logprobs"),
        ("/v1/completions", {"prompt": "a", "prompt_logprobs": 21}, "prompt_logprobs"),
        ("/v1/completions", {"prompt": "a", "logprobs": 1, "logprob_token_ids": [9999]}, "logprob_token_ids"),
        ("/v1/completions", {"prompt": "a", "min_tokens": 5, "max_tokens": 4}, "min_tokens"),
        ("/v1/completions", {"prompt": "a", "structured_outputs": {"regex": "("}}, "structured_outputs"),
        ("/v1/completions", {"prompt": ""}, "prompt"),
        ("/v1/completions", {"prompt": [9999]}, "prompt"),
        ("/v1/completions", {"prompt": [[-1]], "stream": True}, "prompt"),
        ("/v1/completions", {"prompt": [5] * 1024}, "prompt"),
        ("/v1/completions", {"prompt": "a " * 200_000}, "prompt"),
        ("/v1/chat/completions", MESSAGES | {"max_tokens": 0}, "max_tokens"),
        ("/v1/chat/completions", MESSAGES | {"max_completion_tokens": 0}, "max_completion_tokens"),
        ("/v1/chat/completions", MESSAGES | {"max_tokens": 1000, "n": 2000}, "max_tokens"),
        ("/v1/chat/completions", MESSAGES | {"max_completion_tokens": 1000, "n": 2000}, "max_completion_tokens"),
        ("/v1/chat/completions", MESSAGES | {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a " * 1500}]}, "messages"),
        ("/v1/responses", {"input": "a", "max_output_tokens": 0}, "max_output_tokens"),
        ("/v1/responses", {"input": "a", "top_logprobs": 21}, "top_logprobs"),
        ("/v1/responses", {"input": "a", "max_output_tokens": 2, "min_tokens": 3, "stream": True}, "min_tokens"),
        ("/v1/responses", {"input": "a " * 1500}, "input"),
        ("/v1/embeddings", {"input": ""}, "input"),
        ("/v1/embeddings", {"input": [9999]}, "input"),
        ("/v1/embeddings", {"input": "a", "dimensions": 7}, "dimensions"),
        ("/detokenize", {"tokens": [9999]}, "tokens"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_range_error_names_the_field_of_its_endpoint(served, path, body, param):
    assert error_of(served.post(path, **body), 400)["param"] == param


def test_error_of_no_field_names_none(served):
    error = error_of(served.post("/v1/completions", prompt="a", allowed_token_ids=[2], min_tokens=2), 400)
    assert error["param"] is None and "no token is left" in error["message"]


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
