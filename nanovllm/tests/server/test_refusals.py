"""What cannot be served: each is a 4xx in OpenAI's form that says why."""

import time

import pytest

from .served import CLIENT


@pytest.mark.parametrize(
    ("body", "status", "says"),
    [
        ({}, 400, "its body has no prompt"),
        ({"prompt": ""}, 400, "the prompt is empty"),
        ({"prompt": []}, 400, "the prompt is empty"),
        ({"prompt": [1 << 40]}, 400, "token id 1099511627776 is not an int from 0 to"),
        ({"prompt": "a", "temperature": "hot"}, 400, 'temperature must be a number, not "hot"'),
        ({"prompt": "a", "max_tokens": 0}, 400, "max_tokens must be "),
        ({"prompt": [5] * 1024}, 400, "the prompt has 1024 tokens; max_model_len 1024 leaves room for 1023"),
        ({"prompt": [5] * 1024, "stream": True}, 400, "the prompt has 1024 tokens; max_model_len 1024"),
        ({"prompt": "a", "stream_options": {"include_usage": True}}, 400, "stream_options needs stream to be true"),
        ({"prompt": "a", "tempreature": 1}, 400, "unknown field 'tempreature': did you mean temperature?"),
        ({"prompt": "a", "best_of": 3}, 400, "best_of is not served here"),
        ({"prompt": "a", "structured_outputs": {"regex": "("}}, 400, "structured_outputs: "),
        ({"prompt": "a", "model": "gpt-4"}, 404, "the model 'gpt-4' does not exist: this server has 'storyteller'"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_cannot_be_served_is_told_in_openais_form(served, body, status, says):
    response = served.post("/v1/completions", **body)
    error = response.json()["error"]
    assert (response.status_code, error["type"]) == (status, "invalid_request_error")
    assert error["message"].startswith(says) and error.keys() == {"message", "type", "param", "code"}


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"{", "the body is no JSON: "),
        (b"[1]", "the body must be a JSON object"),
        (b"\xff", "the body is no UTF-8 text"),
        (b'{"prompt": NaN}', "the body is no JSON: it has NaN"),
        (b'{"prompt": "\\ud800"}', "the body has half of a character"),
        (b'{"prompt": ' + b"[" * 5000 + b"]" * 5000 + b"}", "the body is nested more than 128 levels deep"),
    ],
    ids=lambda value: str(value[:30]),
)
def test_a_body_that_is_no_json_is_told(served, content, says):
    headers = {"Content-Type": "application/json"}
    response = CLIENT.post(f"{served.url}/v1/completions", content=content, headers=headers)
    assert response.status_code == 400 and response.json()["error"]["message"].startswith(says)


def test_a_body_that_does_not_say_that_it_is_json_is_not_read(served):
    response = CLIENT.post(f"{served.url}/v1/completions", content=b'{"prompt": "a"}')
    assert response.status_code == 415 and "application/json" in response.json()["error"]["message"]


OPENAIS = {"message", "type", "param", "code"}


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        *[
            ("POST", path, 404)
            for path in ("/v1/embeddings", "/v1/audio/speech", "/v1/audio/transcriptions", "/nothing")
        ],
        *[("GET", path, 404) for path in ("/v1/responses/resp_1", "/v1/models/gpt-4", "/v1/completions/", "//")],
        *[("GET", path, 405) for path in ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/tokenize")],
        *[("PUT", "/v1/completions", 405), ("DELETE", "/v1/models/storyteller", 405), ("POST", "/v1/models", 405)],
    ],
)
def test_what_is_not_here_is_told_in_openais_form(served, method, path, status):
    response = CLIENT.request(method, served.url + path)
    error = response.json()["error"]
    assert response.status_code == status and error["message"] and error.keys() == OPENAIS
    assert ("allow" in response.headers) == (status == 405)


@pytest.mark.parametrize(
    "field",
    [
        *({"suffix": "x"}, {"priority": 1}, {"use_beam_search": True}, {"cache_salt": "a"}, {"return_token_ids": True}),
        *({"truncate_prompt_tokens": 3}, {"stream_interval": 2}, {"request_id": "a"}, {"guided_json": {}}, {"n": 0}),
        *({"length_penalty": 2.0}, {"prompt_embeds": "a"}, {"kv_transfer_params": {"a": 1}}, {"prompt_logprobs": -1}),
        *({"logprobs": -1}, {"logprobs": 21}, {"logprob_token_ids": [5]}, {"thinking_token_budget": 4}, {"stop": [""]}),
        *(
            {"stop": ["x"] * 33},
            {"bad_words": list(map(str, range(129)))},
            {"logit_bias": {"a": 1}},
            {"logit_bias": {"9999": 1}},
        ),
        *({"temperature": 10**400}, {"seed": 1 << 70}, {"max_tokens": 2.5}, {"logprobs": True}, {"n": 5000}),
        *({"response_format": {"type": "text", "x": 1}}, {"response_format": {"type": "structural_tag", "format": {}}}),
    ],
    ids=lambda field: str(field)[:40],
)
def test_a_field_that_is_not_served_is_named(served, field):
    response = served.post("/v1/completions", **{"prompt": "a", "max_tokens": 1} | field)
    [name] = field
    said = "choices" if field == {"n": 5000} else name
    assert response.status_code == 400 and said in response.json()["error"]["message"], response.text


@pytest.mark.parametrize(
    "field",
    [
        *({"tools": [{"type": "search"}]}, {"tools": [{"type": "function", "function": {}}]}, {"echo": True}),
        *(
            {"functions": [{"name": "a"}]},
            {"function_call": {"name": "a"}},
            {"verbosity": "low"},
            {"prediction": {"a": 1}},
        ),
        *({"audio": {"voice": "a"}}, {"web_search_options": {"a": 1}}, {"reasoning_effort": "much"}),
        *({"max_completion_tokens": 0}, {"top_logprobs": 2}, {"logprobs": 1}, {"prompt": "a"}, {"stream": "yes"}),
        *({"messages": [{"role": "user", "content": None}]}, {"messages": "Hi"}, {"messages": [{"content": "Hi"}]}),
        *({"messages": [{"role": "assistant", "tool_calls": "x"}]}, {"include_reasoning": False}, {"documents": ["a"]}),
        *({"continue_final_message": True, "add_generation_prompt": True}, {"chat_template_kwargs": {"tools": []}}),
        {"stream_options": {"include_obfuscation": True}, "stream": True},
    ],
    ids=lambda field: str(field)[:40],
)
def test_a_field_that_a_chat_does_not_serve_is_named(served, field):
    asked = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1} | field
    response = served.post("/v1/chat/completions", **asked)
    assert response.status_code == 400 and next(iter(field)) in response.json()["error"]["message"], response.text


def test_a_prompts_log_probabilities_do_not_come_in_a_stream(served):
    response = served.post("/v1/completions", prompt="a", prompt_logprobs=1, stream=True)
    assert response.status_code == 400 and "prompt_logprobs needs stream to be false" in response.text


def test_a_body_of_many_things_keeps_nobody_waiting(served):
    """Each takes less than a second, though a list of it has as many entries as a body has room for."""
    start = time.perf_counter()
    many = list(range(4096)) * 15
    assert served.completion(stop_token_ids=many, max_tokens=1, ignore_eos=True)
    assert served.post("/v1/completions", **{"prompt": "a", "x" * 1_000_000: 1}).status_code == 400
    assert time.perf_counter() - start < 2
