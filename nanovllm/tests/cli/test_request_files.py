"""Files of requests: they are checked as a whole, and errors name the request, the field and the value."""

import io
import json
import random
from dataclasses import fields
from typing import Any

import pytest

from ... import RepetitionDetectionParams, SamplingParams
from ...cli.batch_files import Defaults, Request, RequestsFile, seed_of


def read(text: str, defaults: dict[str, Any] | None = None, seed: int = 0) -> list[Request]:
    stream = io.BytesIO(text.encode("utf-8", "surrogatepass"))
    return list(RequestsFile("a.jsonl", stream, None, Defaults(defaults or {}, seed)))


def error_of(text: str) -> str:
    """Return the error of an invalid file: one line that starts with its name."""
    with pytest.raises(ValueError) as caught:
        read(text)
    assert "\n" not in str(caught.value) and str(caught.value).startswith("a.jsonl")
    return str(caught.value).removeprefix("a.jsonl").removeprefix(":").strip()


def error_of_request(**fields) -> str:
    return error_of(json.dumps({"prompt": "a", **fields}))


def document(*requests) -> str:
    return json.dumps({"requests": requests}, indent=2)


def lines(*requests) -> str:
    return "".join(json.dumps(request) + "\n" for request in requests)


# Valid files


@pytest.mark.parametrize("form", [document, lines])
def test_requests_have_an_index_and_parameters(form):
    text = form({"prompt": "a", "temperature": 0, "top_p": 0.5, "max_tokens": 9}, {"id": "x", "prompt": [1, 2], "n": 3})
    first, second = read(text)
    seeds = [seed_of(0, index) for index in (0, 1)]
    assert first == Request("0", 0, "a", SamplingParams(temperature=0, top_p=0.5, max_tokens=9, seed=seeds[0]))
    assert second == Request("x", 1, [1, 2], SamplingParams(n=3, seed=seeds[1]))


def test_defaults_fill_missing_fields():
    first, second = read(lines({"prompt": "a"}, {"prompt": "b", "top_k": 2}), {"top_k": 7, "max_tokens": 5})
    assert (first.params.top_k, first.params.max_tokens) == (7, 5)
    assert (second.params.top_k, second.params.max_tokens) == (2, 5)


def test_request_may_have_any_field_of_sampling_params():
    fields = {
        "n": 2,
        "temperature": 0.5,
        "top_k": 3,
        "top_p": 1,
        "max_tokens": 4,
        "seed": 5,
        "stop": ["a", "b"],
        "stop_token_ids": [6],
        "ignore_eos": True,
        "logprobs": 0,
        "prompt_logprobs": None,
        "logit_bias": {"7": 2.5},
        "bad_words": ["c"],
        "min_p": 0.1,
    }
    (request,) = read(lines({"prompt": "a", **fields}))
    assert request.params == SamplingParams(**fields | {"logit_bias": {7: 2.5}})


@pytest.mark.parametrize("name", [field.name for field in fields(SamplingParams)])
def test_invalid_type_is_named_with_its_field(name):
    """No field takes a list of objects."""
    assert error_of_request(**{name: [{"a": 1}]}).startswith(f"request 0 (line 1): {name} ")


def test_keys_of_a_logit_bias_are_token_ids():
    (request,) = read(lines({"prompt": "a", "logit_bias": {"5": 1, "07": -0.5}}))
    assert request.params.logit_bias == {5: 1, 7: -0.5}
    assert error_of_request(logit_bias={"a": 1}).startswith("request 0 (line 1): logit_bias must be ")


def test_repetition_detection_is_an_object():
    fields = {"max_pattern_size": 3, "min_count": 2}
    (request,) = read(lines({"prompt": "a", "repetition_detection": fields}))
    assert request.params.repetition_detection == RepetitionDetectionParams(**fields)
    error = error_of_request(repetition_detection={"max": 1})
    assert error.startswith("request 0 (line 1): ") and "RepetitionDetectionParams" in error and "'max'" in error
    assert "min_count must be " in error_of_request(repetition_detection={"min_count": "2"})


def test_seed_depends_on_the_index_of_the_request():
    seeds = [request.params.seed for request in read(lines(*[{"prompt": "a"}] * 3, {"prompt": "a", "seed": 7}))]
    assert len({*seeds}) == 4 and seeds[3] == 7
    others = [request.params.seed for request in read(lines(*[{"prompt": "a"}] * 2), seed=1)]
    assert not {*seeds} & {*others}
    assert read(lines({"prompt": "a", "seed": None}))[0].params.seed == seeds[0]
    assert read(lines({"prompt": "a", "seed": -1}))[0].params.seed == seeds[0], "-1 means no seed"


def test_empty_lines_are_skipped():
    assert [request.prompt for request in read('\n{"prompt": "a"}\n \n{"prompt": "b"}')] == ["a", "b"]


def test_unicode_line_separators_do_not_end_a_line():
    assert read('{"prompt": "a\u2028b\x85c"}\n')[0].prompt == "a\u2028b\x85c"


def test_empty_prompts_are_left_to_the_engine():
    assert [request.prompt for request in read(lines({"prompt": ""}, {"prompt": []}))] == ["", []]


# Invalid files


@pytest.mark.parametrize("text", ["", "\n\n", '{"requests": []}', ' {\n"requests" : [ ] } '])
def test_file_without_requests(text):
    assert error_of(text) == "has no requests"


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        ({"temperature": -1}, "temperature must be at least 0, got -1"),
        ({"temperature": float("nan")}, "temperature must be a finite number, got nan"),
        ({"temperature": "hot"}, "temperature must be a finite number, got 'hot'"),
        ({"top_p": 1.5}, "top_p must be above 0 and at most 1, got 1.5"),
        ({"max_tokens": 0}, "max_tokens must be at least 1, got 0"),
        ({"max_tokens": 16.0}, "max_tokens must be an integer, got 16.0"),
        ({"max_tokens": True}, "max_tokens must be an integer, got True"),
        ({"n": None}, "n must be an integer, got None"),
        ({"n": "2"}, "n must be an integer, got '2'"),
        ({"seed": 1.5}, "seed must be an integer, got 1.5"),
        ({"stop": 3}, "stop must be "),
        ({"stop": ["a", 1]}, "stop must be "),
        ({"stop": [""]}, "stop must be "),
        ({"stop_token_ids": 2}, "stop_token_ids must be a list of integers, got 2"),
        ({"ignore_eos": 1}, "ignore_eos must be True or False, got 1"),
        ({"logprobs": -2}, "logprobs must be at least 0, or -1 for all, got -2"),
        ({"id": 7}, "id must be a string, got 7"),
        ({"prompt": None}, "prompt must be a string or a list of integers, got None"),
        ({"prompt": [1, "a"]}, "prompt must be a string or a list of integers, got [1, 'a']"),
        ({"prompt": [1, True]}, "prompt must be a string or a list of integers, got [1, True]"),
    ],
    ids=str,
)
def test_invalid_value_is_named_with_its_field(request_, message):
    valid, invalid = {"prompt": "a"}, {"prompt": "a", **request_}
    assert error_of_request(**request_).startswith(f"request 0 (line 1): {message}")
    assert error_of(lines(valid, invalid)).startswith(f"request 1 (line 2): {message}")
    assert error_of(document(valid, invalid)).startswith(f"request 1: {message}")


def test_unknown_field_is_named():
    error = error_of_request(tempreature=1)
    assert error.startswith("request 0 (line 1): ") and "'tempreature'" in error


def test_long_value_is_shortened():
    assert len(error_of_request(n=["a" * 1000])) < 300


def test_missing_prompt():
    assert error_of(lines({"prompt": "a"}, {"max_tokens": 3})) == "request 1 (line 2): prompt is missing"


@pytest.mark.parametrize("value", ["a", 3, None, ["a"]])
def test_request_must_be_an_object(value):
    message = f"a request must be an object with a prompt, got {value!r}"
    assert error_of(lines({"prompt": "a"}, value)) == f"request 1 (line 2): {message}"
    assert error_of(document({"prompt": "a"}, value)) == f"request 1: {message}"
    assert error_of(json.dumps(value)) == f"request 0 (line 1): {message}"


def test_ids_are_unique():
    assert error_of(lines(*[{"prompt": "a", "id": id} for id in "xyx"])).startswith("request 2 (line 3): id 'x' ")
    error = error_of(lines({"prompt": "a", "id": "1"}, {"prompt": "b"}))
    assert error.startswith("request 1 (line 2): id '1' "), "by default, the id is the index"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"prompt": "a"}\n{"prompt": "b"', "line 2, column 15: invalid JSON: Expecting ',' delimiter"),
        ('{"prompt": "a"}\n\nprompt: b', "line 3, column 1: invalid JSON: Expecting value"),
        ('{"requests": [\n{"prompt": "a"},\n{"prompt": }]}', "line 3, column 12: invalid JSON: Expecting value"),
        ('{"requests": [\n{"prompt": "a"}\n', "line 3, column 1: invalid JSON: Expecting ',' delimiter"),
        ('\n{"prompt": "a"\n{"prompt": "b"}', "line 3, column 1: invalid JSON: Expecting ',' delimiter"),
        ('{"requests": []}]', "line 1, column 17: invalid JSON: Extra data"),
        ('{"prompt": "a"} {"prompt": "b"}', "line 1, column 17: invalid JSON: Extra data"),
    ],
)
def test_invalid_json_is_named_by_line_and_column(text, message):
    assert error_of(text) == message


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"requests": {"prompt": "a"}}', "\"requests\" must be a list, got {'prompt': 'a'}"),
        ('{"model": "b", "requests": []}', "a document must have only \"requests\", got ['model', 'requests']"),
        ('{"requests": []}\n{"prompt": "a"}', 'line 2: unexpected text after {"requests": [...]}'),
    ],
)
def test_document_has_a_list_of_requests_and_nothing_else(text, message):
    assert error_of(text) == message


def test_document_may_not_follow_a_request():
    assert error_of(lines({"prompt": "a"}, {"requests": []})).startswith("request 1 (line 2): ")


def test_single_request_may_span_several_lines():
    assert [request.prompt for request in read('{\n"prompt":\n"a"}\n')] == ["a"]


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999", "1" * 400])
def test_numbers_must_be_finite(number):
    for field in ("temperature", "top_p"):
        assert error_of('{"prompt": "a", "%s": %s}' % (field, number)).startswith(f"request 0 (line 1): {field} must ")  # noqa: UP031
    if not number.isdigit():
        assert "max_tokens must be an integer" in error_of(f'{{"prompt": "a", "max_tokens": {number}}}')


@pytest.mark.parametrize("seed", range(20))
def test_error_names_the_place_of_the_request(seed):
    """One of several requests is invalid, in a document or in lines."""
    rng = random.Random(seed)
    requests = [{"prompt": rng.choice(["a", [1, 2], "}],\n["]), "stop": ["x"] * rng.randrange(3)} for _ in range(9)]
    form, place = (document, lines)[seed % 2], rng.randrange(9)
    name = f"request {place} (line {place + 1})" if form is lines else f"request {place}"
    assert [request.prompt for request in read(form(*requests))] == [each["prompt"] for each in requests]
    requests[place]["top_p"] = 2
    assert error_of(form(*requests)) == f"{name}: top_p must be above 0 and at most 1, got 2"
