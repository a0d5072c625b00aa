"""A file of requests is judged as a whole, and what is wrong with it is told: which request, field and value."""

import io
import json
import random
from typing import Any

import pytest

from .. import SamplingParams
from ..cli.request import FIELDS, Defaults, Request, seed_of
from ..cli.requests_file import RequestsFile
from ..engine.sampling_params import RepetitionDetectionParams
from ..server.openai.fields import PARAMS
from ..server.openai.json_values import words


def read(text: str, defaults: dict[str, Any] | None = None, seed: int = 0) -> list[Request]:
    stream = io.BytesIO(text.encode("utf-8", "surrogatepass"))
    return list(RequestsFile("a.jsonl", stream, None, Defaults(defaults or {}, seed)))


def wrong(text: str) -> str:
    """What is said of a file; always one line, which begins with its name."""
    with pytest.raises(ValueError) as caught:
        read(text)
    assert "\n" not in str(caught.value) and str(caught.value).startswith("a.jsonl: ")
    return str(caught.value).removeprefix("a.jsonl: ")


def wrong_request(**fields) -> str:
    return wrong(json.dumps({"prompt": "a", **fields}))


def document(*requests) -> str:
    return json.dumps({"requests": requests}, indent=2)


def lines(*requests) -> str:
    return "".join(json.dumps(request) + "\n" for request in requests)


# What is right


@pytest.mark.parametrize("form", [document, lines])
def test_requests_come_with_their_place_and_what_they_ask_for(form):
    text = form({"prompt": "a", "temperature": 0, "top_p": 0.5, "max_tokens": 9}, {"id": "x", "prompt": [1, 2], "n": 3})
    first, second = read(text)
    seeds = [seed_of(0, index) for index in (0, 1)]
    assert first == Request("0", 0, "a", SamplingParams(temperature=0, top_p=0.5, max_tokens=9, seed=seeds[0]))
    assert second == Request("x", 1, [1, 2], SamplingParams(n=3, seed=seeds[1]))


def test_what_a_request_does_not_say_is_as_the_caller_says():
    first, second = read(lines({"prompt": "a"}, {"prompt": "b", "top_k": 2}), {"top_k": 7, "max_tokens": 5})
    assert (first.params.top_k, first.params.max_tokens) == (7, 5)
    assert (second.params.top_k, second.params.max_tokens) == (2, 5)


def test_any_field_of_sampling_params_may_be_said():
    said = {
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
    (request,) = read(lines({"prompt": "a", **said}))
    assert request.params == SamplingParams(**said | {"logit_bias": {7: 2.5}})
    assert all(words(hint) for hint in FIELDS.values())


@pytest.mark.parametrize("name", sorted(PARAMS))
def test_a_value_of_another_type_is_named_with_its_field(name):
    """An object in a list is of no field's type; where anything may stand, the field itself is refused."""
    message = wrong_request(**{name: [{"a": 1}]})
    assert message.startswith(f"request 0 (line 1): {name}") and message.count(name) >= 1


def test_keys_that_are_token_ids_are_numbers():
    (request,) = read(lines({"prompt": "a", "logit_bias": {"5": 1, "07": -0.5}}))
    assert request.params.logit_bias == {5: 1, 7: -0.5}
    assert wrong_request(logit_bias={"a": 1}).endswith('logit_bias must be an object of numbers or null, not {"a": 1}')


def test_an_object_that_is_a_dataclass_is_made_of_its_fields():
    said = {"max_pattern_size": 3, "min_count": 2}
    (request,) = read(lines({"prompt": "a", "repetition_detection": said}))
    assert request.params.repetition_detection == RepetitionDetectionParams(**said)
    says = "unknown field 'max' in repetition_detection: it may have max_pattern_size, min_pattern_size, min_count"
    assert wrong_request(repetition_detection={"max": 1}) == f"request 0 (line 1): {says}"
    says = 'repetition_detection.min_count must be an integer, not "2"'
    assert wrong_request(repetition_detection={"min_count": "2"}) == f"request 0 (line 1): {says}"


def test_a_request_without_a_seed_has_that_of_its_place():
    seeds = [request.params.seed for request in read(lines(*[{"prompt": "a"}] * 3, {"prompt": "a", "seed": 7}))]
    assert len({*seeds}) == 4 and seeds[3] == 7
    others = [request.params.seed for request in read(lines(*[{"prompt": "a"}] * 2), seed=1)]
    assert not {*seeds} & {*others}
    assert read(lines({"prompt": "a", "seed": None}))[0].params.seed == seeds[0]
    assert read(lines({"prompt": "a", "seed": -1}))[0].params.seed == seeds[0], "-1 is none"


def test_empty_lines_are_none():
    assert [request.prompt for request in read('\n{"prompt": "a"}\n \n{"prompt": "b"}')] == ["a", "b"]


def test_a_line_ends_only_where_json_says_so():
    assert read('{"prompt": "a\u2028b\x85c"}\n')[0].prompt == "a\u2028b\x85c"


def test_an_empty_prompt_is_for_the_engine_to_judge():
    assert [request.prompt for request in read(lines({"prompt": ""}, {"prompt": []}))] == ["", []]


# What is wrong


@pytest.mark.parametrize("text", ["", "\n\n", '{"requests": []}', ' {\n"requests" : [ ] } '])
def test_a_file_without_requests(text):
    assert wrong(text) == "there are no requests in it"


@pytest.mark.parametrize(
    ("request_", "says"),
    [
        ({"temperature": -1}, "temperature must be 0 or above, not -1"),
        ({"temperature": float("nan")}, "temperature must be 0 or above, not nan"),
        ({"temperature": "hot"}, 'temperature must be a number, not "hot"'),
        ({"top_p": 1.5}, "top_p must be above 0 and at most 1, not 1.5"),
        ({"max_tokens": 0}, "max_tokens must be a whole number, at least 1, not 0"),
        ({"max_tokens": 16.0}, "max_tokens must be an integer or null, not 16.0"),
        ({"max_tokens": True}, "max_tokens must be an integer or null, not true"),
        ({"n": None}, "n must be an integer, not null"),
        ({"n": "2"}, 'n must be an integer, not "2"'),
        ({"seed": 1.5}, "seed must be an integer or null, not 1.5"),
        ({"stop": 3}, "stop must be a text or a list of texts or null, not 3"),
        ({"stop": ["a", 1]}, 'stop must be a text or a list of texts or null, not ["a", 1]'),
        ({"stop": [""]}, "stop must be a text or several, none of them empty, not ['']"),
        ({"stop_token_ids": 2}, "stop_token_ids must be a list of integers or null, not 2"),
        ({"ignore_eos": 1}, "ignore_eos must be true or false, not 1"),
        ({"logprobs": -2}, "logprobs must be a whole number, 0 or above, or -1 for all, not -2"),
        ({"id": 7}, "id must be a text, not 7"),
        ({"prompt": None}, "prompt must be a text or a list of integers, not null"),
        ({"prompt": [1, "a"]}, 'prompt must be a text or a list of integers, not [1, "a"]'),
        ({"prompt": [1, True]}, "prompt must be a text or a list of integers, not [1, true]"),
    ],
    ids=str,
)
def test_a_wrong_value_is_named_with_its_field(request_, says):
    assert wrong_request(**request_) == f"request 0 (line 1): {says}"
    assert wrong(lines({"prompt": "a"}, {"prompt": "a", **request_})) == f"request 1 (line 2): {says}"
    assert wrong(document({"prompt": "a"}, {"prompt": "a", **request_})) == f"request 1: {says}"


def test_an_unknown_field_is_named_and_those_that_there_are():
    assert wrong_request(tempreature=1) == "request 0 (line 1): unknown field 'tempreature': did you mean temperature?"
    says = f"request 0 (line 1): unknown field 'x': a request may have {', '.join(FIELDS)}"
    assert wrong_request(x=1) == says


def test_a_long_value_is_cut():
    assert wrong_request(n=["a" * 1000]) == f'request 0 (line 1): n must be an integer, not ["{"a" * 55}...'


def test_a_request_without_a_prompt():
    assert wrong(lines({"prompt": "a"}, {"max_tokens": 3})) == "request 1 (line 2): it has no prompt"


@pytest.mark.parametrize("value", ["a", 3, None, ["a"]])
def test_what_is_no_object_is_no_request(value):
    says = f"a request must be an object with a prompt, not {json.dumps(value)}"
    assert wrong(lines({"prompt": "a"}, value)) == f"request 1 (line 2): {says}"
    assert wrong(document({"prompt": "a"}, value)) == f"request 1: {says}"
    assert wrong(json.dumps(value)) == f"request 0 (line 1): {says}"


def test_an_id_is_given_once():
    assert (
        wrong(lines(*[{"prompt": "a", "id": id} for id in "xyx"])) == "request 2 (line 3): id 'x' is taken by request 0"
    )
    says = "request 1 (line 2): id '1' is taken by request 0"
    assert wrong(lines({"prompt": "a", "id": "1"}, {"prompt": "b"})) == says, "the other's is its place"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{"prompt": "a"}\n{"prompt": "b"', "line 2, column 15: no JSON: Expecting ',' delimiter"),
        ('{"prompt": "a"}\n\nprompt: b', "line 3, column 1: no JSON: Expecting value"),
        ('{"requests": [\n{"prompt": "a"},\n{"prompt": }]}', "line 3, column 12: no JSON: Expecting value"),
        ('{"requests": [\n{"prompt": "a"}\n', "line 3, column 1: no JSON: Expecting ',' delimiter"),
        ('\n{"prompt": "a"\n{"prompt": "b"}', "line 3, column 1: no JSON: Expecting ',' delimiter"),
        ('{"requests": []}]', "line 1, column 17: no JSON: Extra data"),
        ('{"prompt": "a"} {"prompt": "b"}', "line 1, column 17: no JSON: Extra data"),
    ],
)
def test_what_is_no_json_is_told_by_line_and_column(text, says):
    assert wrong(text) == says


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{"requests": {"prompt": "a"}}', '"requests" must be a list, not {"prompt": "a"}'),
        (
            '{"model": "b", "requests": [{"prompt": "a"}]}',
            'beside "requests" there may be nothing else, and there is ["model", "requests"]',
        ),
    ],
)
def test_a_document_has_a_list_of_requests_and_nothing_else(text, says):
    assert wrong(text) == says


def test_a_line_that_has_requests_is_no_request():
    assert wrong(lines({"prompt": "a"}, {"requests": []})).startswith("request 1 (line 2): unknown field 'requests'")


def test_one_request_may_take_several_lines():
    assert [request.prompt for request in read('{\n"prompt":\n"a"}\n')] == ["a"]


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999", "1" * 400])
def test_what_is_no_number_is_none_for_the_engine(number):
    for field in ("temperature", "top_p"):
        assert wrong('{"prompt": "a", "%s": %s}' % (field, number)).startswith(f"request 0 (line 1): {field} must ")  # noqa: UP031
    if not number.isdigit():
        assert "must be an integer or null, not " in wrong(f'{{"prompt": "a", "max_tokens": {number}}}')


@pytest.mark.parametrize("seed", range(20))
def test_wherever_the_mistake_is_it_is_found_there(seed):
    """Requests of all kinds in either form, with one that is wrong."""
    rng = random.Random(seed)
    requests = [{"prompt": rng.choice(["a", [1, 2], "}],\n["]), "stop": ["x"] * rng.randrange(3)} for _ in range(9)]
    form, place = (document, lines)[seed % 2], rng.randrange(9)
    says = f"request {place} (line {place + 1})" if form is lines else f"request {place}"
    assert [request.prompt for request in read(form(*requests))] == [each["prompt"] for each in requests]
    requests[place]["top_p"] = 2
    assert wrong(form(*requests)) == f"{says}: top_p must be above 0 and at most 1, not 2"
