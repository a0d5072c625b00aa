"""Request bodies: which fields are read, which are refused, and the error messages."""

import json
from pathlib import Path
from typing import Any

import pytest
from openai.types.chat.completion_create_params import CompletionCreateParamsBase as ChatParams
from openai.types.completion_create_params import CompletionCreateParamsBase as CompletionParams
from openai.types.responses.response_create_params import ResponseCreateParamsBase as ResponseParams

from ... import SamplingParams
from ...requests.sampling_params import UNSUPPORTED as UNSUPPORTED_PARAMS
from ...server.bodies import UNSUPPORTED, InvalidRequest, ParsedRequest
from ...server.chat import CHAT, ChatCompletionRequest
from ...server.completions import COMPLETIONS, CompletionRequest
from ...server.limits import check_json_size
from ...server.responses import RESPONSES, ResponsesRequest
from ..testing.watch import num_calls

FILE = Path(__file__).parents[1] / "data" / "vllm_0_32" / "bodies.json"
VLLM_FIELDS = {name: dict(rows) for name, rows in json.loads(FILE.read_text()).items() if name != "vllm"}
MESSAGES = [{"role": "user", "content": "Hi"}]
TOOL = {"type": "function", "function": {"name": "look"}}
MODELS = {COMPLETIONS: CompletionRequest, CHAT: ChatCompletionRequest, RESPONSES: ResponsesRequest}
OPENAI_PARAMS = {COMPLETIONS: CompletionParams, CHAT: ChatParams, RESPONSES: ResponseParams}
MINIMAL: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": "a"},
    CHAT: {"messages": MESSAGES},
    RESPONSES: {"input": "a"},
}


def parse(url: str, body: dict[str, Any] | bytes) -> ParsedRequest:
    return MODELS[url].parse(body if isinstance(body, bytes) else json.dumps(body).encode()).parsed()


def refusal(url: str, body: dict[str, Any] | bytes) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        parse(url, body)
    return caught.value


def in_engine_terms(parsed: ParsedRequest) -> dict[str, Any]:
    return {**vars(parsed), "params": SamplingParams(**parsed.params)}


# Known, unsupported and unknown fields


@pytest.mark.parametrize("url", MODELS)
def test_every_field_of_openai_and_vllm_is_read_refused_or_ignored(url):
    """A field that has no effect must not be one of SamplingParams."""
    minimal, ignored = MINIMAL[url], set()
    for name in {*OPENAI_PARAMS[url].__annotations__, *VLLM_FIELDS[MODELS[url].__name__]} - minimal.keys():
        try:
            parsed = parse(url, minimal | {name: {"such": "nonsense"}})
        except InvalidRequest as error:
            assert error.param and error.param.split(".")[0] == name, error
            continue
        if name not in ("chat_template_kwargs", "repetition_detection"):  # objects whose unknown entries are ignored
            assert in_engine_terms(parsed) == in_engine_terms(parse(url, minimal)), name
            ignored.add(name)
    assert not ignored & {*SamplingParams().__dict__, *UNSUPPORTED} - {*UNSUPPORTED_PARAMS}


@pytest.mark.parametrize("url", MODELS)
def test_vllm_defaults_change_nothing(url):
    minimal, fields = MINIMAL[url], VLLM_FIELDS[MODELS[url].__name__]
    defaults = {name: value for name, value in fields.items() if name not in minimal and not isinstance(value, dict)}
    assert len(defaults) > 40
    for name, value in defaults.items():
        assert in_engine_terms(parse(url, minimal | {name: value})) == in_engine_terms(parse(url, minimal)), name


@pytest.mark.parametrize("url", MODELS)
def test_unknown_fields_are_ignored(url):
    unknown = {"tempreature": 1, "user_data": {"a": [1]}, "x" * 1000: None, "store": True, "service_tier": "auto"}
    assert parse(url, MINIMAL[url] | unknown) == parse(url, MINIMAL[url])


def test_null_is_the_same_as_a_missing_field():
    fields = dict.fromkeys(CompletionRequest.model_fields.keys() - {"prompt"})
    assert parse(COMPLETIONS, {"prompt": "a"} | fields) == parse(COMPLETIONS, {"prompt": "a"})
    options = {"stream_options": {"include_usage": None}}
    assert parse(COMPLETIONS, {"prompt": "a"} | options) == parse(COMPLETIONS, {"prompt": "a"})


@pytest.mark.parametrize(
    "field",
    [
        *({"suffix": "x"}, {"use_beam_search": True}, {"guided_json": {}}, {"prompt_embeds": "a"}, {"best_of": 3}),
        *({"thinking_token_budget": 4}, {"functions": [{"name": "a"}]}, {"function_call": {"name": "a"}}),
        *({"web_search_options": {"a": 1}}, {"modalities": ["audio"]}, {"return_tokens_as_token_ids": True}),
        *({"chat_template": "{{ 1 }}"}, {"previous_response_id": "resp_1"}, {"conversation": "conv_1"}),
    ],
    ids=str,
)
def test_unsupported_field_is_named(field):
    [name] = field
    error = refusal(COMPLETIONS, {"prompt": "a"} | field)
    assert (error.param, error.code) == (name, "unsupported_value") and name in str(error)


@pytest.mark.parametrize(
    "field",
    [
        *({"priority": 1}, {"verbosity": "low"}, {"length_penalty": 2.0}, {"store": True}),
        *({"kv_transfer_params": {"a": 1}}, {"vllm_xargs": {"a": 1}}, {"mirostat": 2}, {"background": True}),
    ],
    ids=str,
)
def test_field_that_leaves_the_answer_alone_is_ignored(field):
    body = CompletionRequest.parse(json.dumps({"prompt": "a"} | field).encode())
    assert body.parsed() == parse(COMPLETIONS, {"prompt": "a"}) and body.unknown_fields() == {*field}


@pytest.mark.parametrize(("n", "best_of"), [(None, 1), (2, 1), (2, 2), (2, None)])
def test_best_of_up_to_n_has_no_effect(n, best_of):
    assert parse(COMPLETIONS, {"prompt": "a", "n": n, "best_of": best_of}) == parse(
        COMPLETIONS, {"prompt": "a", "n": n}
    )


# Wrong types and values


@pytest.mark.parametrize(
    ("url", "field", "path", "expected"),
    [
        (COMPLETIONS, {"temperature": "hot"}, "temperature", 'a valid number, got "hot"'),
        (COMPLETIONS, {"max_tokens": 2.5}, "max_tokens", "a valid integer, got 2.5"),
        (COMPLETIONS, {"logprobs": True}, "logprobs", "a valid integer, got true"),
        (COMPLETIONS, {"stop": 5}, "stop", "a valid string or a valid array, got 5"),
        (COMPLETIONS, {"stop": ["a", 5]}, "stop[1]", "a valid string, got 5"),
        (COMPLETIONS, {"prompt": {}}, "prompt", "a valid string or a valid array, got {}"),
        (COMPLETIONS, {"prompt": ["a", 5]}, "prompt[1]", "a valid string or a valid array, got 5"),
        (COMPLETIONS, {"prompt": [5, 0.5]}, "prompt[1]", "a valid integer, got 0.5"),
        (COMPLETIONS, {"prompt": [[5], ["x"]]}, "prompt[1][0]", 'a valid integer, got "x"'),
        (COMPLETIONS, {"stream_options": 5}, "stream_options", "an object, got 5"),
        (CHAT, {"stream": "yes"}, "stream", 'a valid boolean, got "yes"'),
        (CHAT, {"messages": "Hi"}, "messages", 'a valid array, got "Hi"'),
        (CHAT, {"messages": [5]}, "messages[0]", "an object, got 5"),
        (CHAT, {"messages": [{"role": "user", "content": 5}]}, "messages[0].content", "a valid array, got 5"),
        (
            CHAT,
            {"messages": [{"role": "assistant", "tool_calls": "b"}]},
            "messages[0].tool_calls",
            'a valid array, got "b"',
        ),
        (RESPONSES, {"metadata": 5}, "metadata", "an object, got 5"),
    ],
    ids=str,
)
def test_field_of_the_wrong_type_is_named(url, field, path, expected):
    error = refusal(url, MINIMAL[url] | field)
    assert str(error).startswith(f"Invalid '{path}': Input should be") and f"{expected}." in str(error)
    assert (error.param, error.code) == (path, "invalid_type")


@pytest.mark.parametrize(
    ("url", "field", "param"),
    [
        (CHAT, {"tool_choice": "required"}, "tool_choice"),
        (CHAT, {"tool_choice": {"type": "function", "function": {"name": "look"}}}, "tool_choice"),
        (CHAT, {"reasoning_effort": "much"}, "reasoning_effort"),
        (CHAT, {"tools": [{"type": "search"}]}, "tools[0].type"),
        (CHAT, {"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
        (CHAT, {"tools": [TOOL], "tool_choice": "always"}, "tool_choice"),
        (CHAT, {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "fly"}}}, "tool_choice"),
        (CHAT, {"messages": []}, "messages"),
        (CHAT, {"messages": [{"role": "user"}]}, "messages[0].content"),
        (CHAT, {"messages": [{"content": "Hi"}]}, "messages[0].role"),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].type"),
        (CHAT, {"chat_template_kwargs": {"chat_template": "{{ 1 }}"}}, "chat_template_kwargs"),
        (CHAT, {"max_completion_tokens": 0}, "max_completion_tokens"),
        (CHAT, {"top_logprobs": 2}, "top_logprobs"),
        (CHAT, {"stream_options": {"include_usage": True}}, "stream_options"),
        (CHAT, {"stream_options": {"include_obfuscation": True}, "stream": True}, "stream_options.include_obfuscation"),
        (CHAT, {"response_format": {"type": "structural_tag", "format": {}}}, "response_format.type"),
        (CHAT, {"response_format": {"type": "json_schema"}}, "response_format"),
        (CHAT, {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}}, "response_format"),
        (COMPLETIONS, {"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        (COMPLETIONS, {"logprob_token_ids": [5]}, "logprob_token_ids"),
        (COMPLETIONS, {"logit_bias": {"5": "x"}}, "logit_bias"),
        (COMPLETIONS, {"logit_bias": {"x": 5}}, "logit_bias"),
        (COMPLETIONS, {"structured_outputs": {"json": 5}}, "structured_outputs"),
        (RESPONSES, {"input": []}, "input"),
        (RESPONSES, {"input": [{"type": "reasoning"}]}, "input[0]"),
        (RESPONSES, {"input": [{"type": "function_call", "name": 5, "arguments": "{}"}]}, "input[0]"),
        (RESPONSES, {"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type"),
        (RESPONSES, {"max_output_tokens": 0}, "max_output_tokens"),
        (RESPONSES, {"text": {"format": {"type": "grammar"}}}, "text.format.type"),
        (CHAT, {"truncation_side": "middle"}, "truncation_side"),
        (CHAT, {"request_id": "a\nb"}, "request_id"),
        (RESPONSES, {"reasoning": {"effort": "much"}}, "reasoning.effort"),
        (RESPONSES, {"tools": [{"type": "web_search"}]}, "tools[0].type"),
        (RESPONSES, {"tools": [{"type": "function"}]}, "tools[0].name"),
        (RESPONSES, {"include": ["file_search_call.results"]}, "include[0]"),
    ],
    ids=str,
)
def test_invalid_value_is_named(url, field, param):
    error = refusal(url, MINIMAL[url] | field)
    assert error.param == param and param.split(".")[0].split("[")[0] in str(error), error


@pytest.mark.parametrize("url", MODELS)
def test_missing_field_is_named(url):
    error, [name] = refusal(url, {}), MINIMAL[url]
    assert str(error) == f"Missing required parameter: '{name}'."
    assert (error.param, error.code) == (name, "missing_required_parameter")


# Sizes


@pytest.mark.parametrize(
    ("url", "field", "limit"),
    [
        (COMPLETIONS, {"stop": ["a"] * 33}, 32),
        *((url, {"stop": stop}, "4,096") for url in (CHAT, RESPONSES) for stop in ("a" * 4097, ["a" * 2000] * 3)),
        (COMPLETIONS, {"bad_words": ["a"] * 129}, 128),
        (COMPLETIONS, {"logit_bias": {str(i): 1 for i in range(70_000)}}, 65_536),
        (COMPLETIONS, {"prompt": ["a"] * 2049}, 2048),
        (COMPLETIONS, {"structured_outputs": {"regex": "a" * 65_536}}, 65_536),
        (CHAT, {"messages": MESSAGES * 8193}, 8192),
        (RESPONSES, {"input": MESSAGES * 8193}, 8192),
        (RESPONSES, {"metadata": dict.fromkeys(map(str, range(17)), "")}, 16),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_too_many_entries_are_refused(url, field, limit):
    error = refusal(url, MINIMAL[url] | field)
    assert error.param == next(iter(field)) and f"{limit}" in str(error)


@pytest.mark.parametrize("parameters", ["x", [], 5, True])
def test_parameters_of_a_function_must_be_an_object(parameters):
    function = {"name": "look", "parameters": parameters}
    forms = [(CHAT, {"type": "function", "function": function}, "tools[0].function.parameters")]
    forms += [(RESPONSES, {"type": "function", **function}, "tools[0].parameters")]
    for url, tool, path in forms:
        for choice in ("auto", "required", {"type": "function", "name": "look"}):
            assert refusal(url, MINIMAL[url] | {"tools": [tool], "tool_choice": choice}).param == path


def test_large_bodies_are_allowed():
    assert parse(COMPLETIONS, {"prompt": [5] * 100_000, "stop": ["a"] * 32}).prompts == [[5] * 100_000]
    assert parse(CHAT, {"messages": MESSAGES * 8192}).is_chat


@pytest.mark.parametrize(
    "field",
    [
        *({"prompt": [{}] * 16_000}, {"prompt": [5] * 100_000 + ["x"]}, {"stop": ["a"] * 100_000 + [5]}),
        *({"logit_bias": {str(i): "x" for i in range(20_000)}}, {"stop_token_ids": ["x"] * 100_000}),
        {f"f{i}": 1 for i in range(20_000)} | {"prompt": 5},
    ],
    ids=range(6),
)
def test_errors_of_large_bodies_are_found_in_few_calls(field):
    body = json.dumps({"prompt": "a"} | field).encode()
    assert len(str(refusal(COMPLETIONS, body))) < 300
    assert num_calls(lambda: refusal(COMPLETIONS, body)) < 5000


@pytest.mark.parametrize("field", [{"stop_token_ids": [*range(4096)] * 15}, {"x" * 1_000_000: 1}], ids=range(2))
def test_large_bodies_are_read_in_few_calls(field):
    body = json.dumps({"prompt": "a"} | field).encode()
    assert num_calls(lambda: parse(COMPLETIONS, json.loads(body))) < 5000


# JSON


@pytest.mark.parametrize(
    "body",
    [
        *(b"", b"{", b"\xff", b'{"prompt": "\\ud800"}', b'{"prompt": "a"} {}', b'\xef\xbb\xbf{"prompt": "a"}'),
        b'{"prompt": ' + b"[" * 5000 + b"]" * 5000 + b"}",
    ],
    ids=range(7),
)
def test_invalid_json_is_refused(body):
    assert str(refusal(COMPLETIONS, body)).startswith("Invalid body: Invalid JSON: ")


@pytest.mark.parametrize("body", [b"[1]", b"null", b"5", b'"a"', b"[{}]"])
def test_body_must_be_an_object(body):
    assert str(refusal(COMPLETIONS, body)) == "Invalid body: Input should be an object."


@pytest.mark.parametrize("body", [b'{"a": [' + b"{}," * 140_000 + b"1]}", b"{" + b'"a":1,' * 140_000 + b'"b":1}'])
def test_too_many_objects_and_fields_are_refused(body):
    with pytest.raises(InvalidRequest, match=r"has 140,00. objects, arrays and fields, and at most 131,072"):
        check_json_size(body)


def test_brackets_in_strings_do_not_count():
    check_json_size(b'{"a": "' + b"[{:" * 50_000 + b'\\"[", "b": []}')


# Fields, translated for the engine


def test_chat_template_options():
    def options(**fields: Any) -> dict[str, Any]:
        return ChatCompletionRequest.parse(json.dumps({"messages": MESSAGES} | fields).encode()).chat().options

    documents = [{"title": "a", "text": "b"}]
    assert options(tools=[TOOL], documents=documents) == {"tools": [TOOL], "documents": documents}
    assert options(tools=[]) == {}
    assert options(reasoning_effort="none") == {"reasoning_effort": "none", "enable_thinking": False}
    thinking = {"enable_thinking": True, "style": "old"}
    assert options(reasoning_effort="none", chat_template_kwargs=thinking) == {"reasoning_effort": "none"} | thinking
    assert options(continue_final_message=True)["add_generation_prompt"] is False


@pytest.mark.parametrize(
    ("url", "field", "params"),
    [
        (COMPLETIONS, {"logprobs": 2, "n": 3}, {"logprobs": 2, "n": 3}),
        (COMPLETIONS, {"logit_bias": {"5": -1000, "6": 1}}, {"logit_bias": {5: -100.0, 6: 1.0}}),
        (COMPLETIONS, {"logprobs": 1, "logprob_token_ids": [5]}, {"logprob_token_ids": [5]}),
        (COMPLETIONS, {"response_format": {"type": "text", "x": 1}}, {}),
        (CHAT, {"logprobs": True}, {"logprobs": 0}),
        (CHAT, {"logprobs": True, "top_logprobs": 2}, {"logprobs": 2}),
        (CHAT, {"logprobs": False, "top_logprobs": 0}, {}),
        (CHAT, {"max_tokens": 5, "max_completion_tokens": 3}, {"max_tokens": 3}),
        (RESPONSES, {"max_output_tokens": 3, "max_tokens": 5, "n": 2}, {"max_tokens": 3}),
        (RESPONSES, {"include": ["message.output_text.logprobs"]}, {"logprobs": 0}),
    ],
    ids=str,
)
def test_sampling_params(url, field, params):
    assert parse(url, MINIMAL[url] | field).params == params


def test_forms_become_structured_outputs():
    schema = {"type": "object"}
    chat = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema, "strict": True}}
    response = {"format": {"type": "json_schema", "name": "a", "schema": schema}}
    bodies = [
        (CHAT, {"response_format": chat}),
        (RESPONSES, {"text": response}),
        (COMPLETIONS, {"structured_outputs": {"json": schema}}),
    ]
    for url, field in bodies:
        assert parse(url, MINIMAL[url] | field).params["structured_outputs"].json == schema
    params = parse(CHAT, MINIMAL[CHAT] | {"response_format": {"type": "json_object"}}).params
    assert params["structured_outputs"].json_object is True


def test_body_comes_before_the_command_and_the_checkpoint():
    recommended, defaults = {"temperature": 0.6, "top_p": 0.9, "max_tokens": 16}, {"top_p": 0.8}
    body = parse(COMPLETIONS, {"prompt": "a", "top_k": 5})
    assert body.sampling_params(recommended, defaults) == {
        "temperature": 0.6,
        "top_p": 0.8,
        "top_k": 5,
        "max_tokens": 16,
    }
    assert parse(CHAT, MINIMAL[CHAT]).sampling_params(recommended)["max_tokens"] is None, "up to the model's limit"
    assert parse(CHAT, MINIMAL[CHAT]).sampling_params(recommended, {"max_tokens": 4})["max_tokens"] == 4
