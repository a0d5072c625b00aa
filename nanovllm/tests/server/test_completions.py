"""/v1/completions, whole: what LLM gives for the same prompt, in OpenAI's form."""

import httpx
import pytest

from ... import LLM, SamplingParams
from ..helpers import OPTIONS
from .served import STORYTELLER, answer

PROMPT = "Once upon a time"


@pytest.fixture(scope="module")
def llm():
    return LLM(str(STORYTELLER), **OPTIONS)


def test_a_completion_is_what_the_engine_gives(served, llm):
    body = served.completion(PROMPT, max_tokens=16)
    [expected] = llm.generate([PROMPT], SamplingParams(temperature=0, max_tokens=16))
    [choice] = body["choices"]
    text = expected.outputs[0].text
    assert choice == {"index": 0, "text": text, "logprobs": None, "finish_reason": "length", "stop_reason": None}
    assert (body["object"], body["model"]) == ("text_completion", "storyteller") and body["id"].startswith("cmpl-")
    made = {"prompt_tokens": len(expected.prompt_token_ids), "completion_tokens": 16}
    assert {name: body["usage"][name] for name in made} == made
    assert body["usage"]["total_tokens"] == sum(made.values())


def test_a_seed_gives_the_same_samples_as_the_engine(served, llm):
    body = served.completion(PROMPT, n=2, seed=7, temperature=0.9)
    params = llm.get_default_sampling_params()
    params.n, params.seed, params.temperature, params.max_tokens = 2, 7, 0.9, 8
    [expected] = llm.generate([PROMPT], params)
    assert [each["text"] for each in body["choices"]] == [each.text for each in expected.outputs]
    assert served.completion(PROMPT, n=2, seed=7, temperature=0.9)["choices"] == body["choices"]


def test_what_was_computed_before_is_told_as_cached(served):
    prompt = "A fox and a rabbit sat in a wood, and the fox told the rabbit a story of a wolf." * 2
    first, second = (served.completion(prompt)["usage"] for _ in range(2))
    assert first["prompt_tokens"] == second["prompt_tokens"] > 32
    assert second["prompt_tokens_details"]["cached_tokens"] >= 32 > first["prompt_tokens_details"]["cached_tokens"]


def test_prompts_are_texts_or_token_ids_one_or_several(served):
    ids = answer(served.post("/tokenize", prompt=PROMPT))["tokens"]
    text = served.completion(PROMPT)["choices"][0]["text"]
    for prompt in (ids, [ids], [PROMPT]):
        assert served.completion(prompt)["choices"][0]["text"] == text
    several = served.completion([PROMPT, "The fox", ids], n=2, max_tokens=4)
    assert [choice["index"] for choice in several["choices"]] == [0, 1, 2, 3, 4, 5]
    texts = [choice["text"] for choice in several["choices"]]
    alone = served.completion("The fox", max_tokens=4)["choices"][0]["text"]
    assert texts[2:4] == [alone] * 2 and texts[:2] == texts[4:] and text.startswith(texts[0])
    assert several["usage"]["completion_tokens"] == 24


def test_stop_strings_and_stop_tokens_end_a_text(served):
    whole = served.completion()["choices"][0]["text"]
    word = whole.split()[3]
    [choice] = served.completion(stop=[word])["choices"]
    assert choice["text"] == whole[: whole.index(word)]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", word)


def test_log_probabilities_of_each_token_and_of_the_likeliest_in_its_place(served, llm):
    told = served.completion(PROMPT, logprobs=2, max_tokens=4)["choices"][0]["logprobs"]
    [output] = llm.generate([PROMPT], SamplingParams(temperature=0, max_tokens=4, logprobs=2))
    expected = [place[token].logprob for token, place in zip(*tokens_of(output), strict=True)]
    assert told["token_logprobs"] == pytest.approx(expected, abs=1e-4)
    assert all(len(place) == 2 for place in told["top_logprobs"])
    assert told["text_offset"] == [0, *(sum(map(len, told["tokens"][:i])) for i in (1, 2, 3))]


def tokens_of(output):
    return output.outputs[0].token_ids, output.outputs[0].logprobs


def test_an_echo_begins_with_the_prompt_and_what_is_told_of_it(served, llm):
    [choice] = served.completion(PROMPT, echo=True, logprobs=1, max_tokens=2)["choices"]
    assert choice["text"] == PROMPT + served.completion(PROMPT, max_tokens=2)["choices"][0]["text"]
    told = choice["logprobs"]
    params = SamplingParams(temperature=0, max_tokens=2, logprobs=1, prompt_logprobs=1)
    [output] = llm.generate([PROMPT], params)
    tokens, places = tokens_of(output)
    pairs = zip([*output.prompt_token_ids[1:], *tokens], [*output.prompt_logprobs[1:], *places], strict=True)
    expected = [place[token].logprob for token, place in pairs]
    assert told["token_logprobs"][0] is told["top_logprobs"][0] is None
    assert told["token_logprobs"][1:] == pytest.approx(expected, abs=1e-4)


def test_structured_outputs_hold_the_text_to_a_form(served):
    choices = ["a fox", "a wolf"]
    assert served.completion(structured_outputs={"choice": choices})["choices"][0]["text"] in choices
    [choice] = served.completion(structured_outputs={"regex": "[0-9]{4}"}, max_tokens=20)["choices"]
    assert len(choice["text"]) == 4 and choice["text"].isdecimal()


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
    response = httpx.post(f"{served.url}/v1/completions", content=content, headers=headers)
    assert response.status_code == 400 and response.json()["error"]["message"].startswith(says)


def test_a_body_that_does_not_say_that_it_is_json_is_not_read(served):
    response = httpx.post(f"{served.url}/v1/completions", content=b'{"prompt": "a"}')
    assert response.status_code == 415 and "application/json" in response.json()["error"]["message"]


@pytest.mark.parametrize("path", ["/v1/embeddings", "/v1/audio/speech", "/v1/audio/transcriptions", "/nothing"])
def test_what_is_not_here_is_a_404_in_openais_form(served, path):
    response = served.post(path, input="a")
    assert response.status_code == 404 and response.json()["error"]["message"]
