"""/v1/completions: the outputs of an LLM in OpenAI's form, and the same from a batch."""

import io
import json

import pytest

from ... import SamplingParams
from ...checkpoints.model_config import default_sampling_params
from ...cli.batch import serve_all
from ...cli.batch_files import Defaults, RequestsFile
from ..testing.served import STORYTELLER, answer

PROMPT = "Once upon a time"


def test_completion_equals_the_engines_output(served, llm):
    body = served.completion(PROMPT, max_tokens=16)
    [expected] = llm.generate([PROMPT], SamplingParams(temperature=0, max_tokens=16))
    [choice] = body["choices"]
    text = expected.outputs[0].text
    assert choice == {"index": 0, "text": text, "logprobs": None, "finish_reason": "length", "stop_reason": None}
    assert (body["object"], body["model"]) == ("text_completion", "storyteller") and body["id"].startswith("cmpl-")
    made = {"prompt_tokens": len(expected.prompt_token_ids), "completion_tokens": 16}
    assert {name: body["usage"][name] for name in made} == made
    assert body["usage"]["total_tokens"] == sum(made.values())


def test_seeded_samples_equal_the_engines(served, llm):
    body = served.completion(PROMPT, n=2, seed=7, temperature=0.9)
    params = llm.get_default_sampling_params()
    params.n, params.seed, params.temperature, params.max_tokens = 2, 7, 0.9, 8
    [expected] = llm.generate([PROMPT], params)
    assert [each["text"] for each in body["choices"]] == [each.text for each in expected.outputs]
    assert served.completion(PROMPT, n=2, seed=7, temperature=0.9)["choices"] == body["choices"]


def test_usage_counts_cached_tokens(served):
    prompt = "A fox and a rabbit sat in a wood, and the fox told the rabbit a story of a wolf." * 2
    first, second = (served.completion(prompt)["usage"] for _ in range(2))
    assert first["prompt_tokens"] == second["prompt_tokens"] > 32
    assert second["prompt_tokens_details"]["cached_tokens"] >= 32 > first["prompt_tokens_details"]["cached_tokens"]


def test_prompts_may_be_strings_or_token_ids(served):
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


def test_stop_string(served):
    whole = served.completion()["choices"][0]["text"]
    word = whole.split()[3]
    [choice] = served.completion(stop=[word])["choices"]
    assert choice["text"] == whole[: whole.index(word)]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", word)


def test_structured_outputs(served):
    choices = ["a fox", "a wolf"]
    assert served.completion(structured_outputs={"choice": choices})["choices"][0]["text"] in choices
    [choice] = served.completion(structured_outputs={"regex": "[0-9]{4}"}, max_tokens=20)["choices"]
    assert len(choice["text"]) == 4 and choice["text"].isdecimal()


@pytest.mark.parametrize(
    "field",
    [
        *({"suffix": ""}, {"best_of": 1}, {"user": "me"}, {"priority": 0}, {"use_beam_search": False}, {"n": None}),
        *({"return_token_ids": False}, {"session_id": "a"}, {"stream": None}, {"vllm_xargs": {}}, {"echo": False}),
        *({"min_p": 0.0, "top_k": -1, "min_tokens": 0, "stop_token_ids": [], "bad_words": []}, {"logit_bias": {}}),
        {"metadata": {"a": "b"}, "store": True, "service_tier": "auto", "prompt_cache_options": {}},
    ],
    ids=str,
)
def test_fields_without_an_effect(served, field):
    assert served.completion(max_tokens=2, **field)["choices"] == served.completion(max_tokens=2)["choices"]


def test_response_has_the_first_name_of_the_model(served):
    for name in ("storyteller", "fox", None):
        assert served.completion(max_tokens=1, model=name)["model"] == "storyteller"


def test_sampling_params_take_effect(served):
    assert served.completion(allowed_token_ids=[500], max_tokens=3)["choices"][0]["text"] == " wor" * 3
    biased = served.completion(logit_bias={"500": 1000}, max_tokens=3)["choices"][0]["text"]
    assert biased == " wor" * 3, "clamped to 100, as in vLLM"
    assert " upon" not in served.completion(bad_words=[" upon"])["choices"][0]["text"]
    *_, time = answer(served.post("/tokenize", prompt="upon a time", add_special_tokens=False))["tokens"]
    [choice] = served.completion("Once", stop_token_ids=[time])["choices"]
    assert (choice["text"], choice["stop_reason"]) == (" upon a", time)


HELLO = [{"role": "user", "content": "Tell me of a fox."}]
BODIES = [
    ("/v1/completions", {"prompt": PROMPT, "n": 2, "seed": 3, "logprobs": 2, "max_tokens": 4}),
    ("/v1/completions", {"prompt": [5, 6, 7], "temperature": 0, "stop": ["e"], "prompt_logprobs": 1}),
    ("/v1/completions", {"prompt": PROMPT, "temperature": 0, "logprobs": 1, "logprob_token_ids": [5]}),
    ("/v1/chat/completions", {"messages": HELLO, "seed": 1, "max_completion_tokens": 4, "top_p": 0.7}),
    (
        "/v1/chat/completions",
        {"messages": HELLO, "temperature": 0, "logprobs": True, "top_logprobs": 2, "max_tokens": 2},
    ),
    ("/v1/chat/completions", {"messages": HELLO, "temperature": 0, "prompt_logprobs": 0, "max_tokens": 2}),
    ("/v1/chat/completions", {"messages": HELLO, "structured_outputs": {"choice": ["a fox"]}, "temperature": 0}),
]


def test_batch_results_equal_the_servers_responses(served, llm):
    lines = [{"custom_id": str(i), "url": url, "body": body} for i, (url, body) in enumerate(BODIES)]
    file = io.BytesIO("\n".join(map(json.dumps, lines)).encode())
    recommended = default_sampling_params(str(STORYTELLER)) | {"max_tokens": 16}
    requests, results = RequestsFile("f", file, None, Defaults({}, recommended=recommended)), io.BytesIO()
    assert serve_all(llm, requests, results, "storyteller") == 0
    bodies = {each["custom_id"]: each["response"]["body"] for each in map(json.loads, results.getvalue().splitlines())}
    for line in lines:
        expected = answer(served.post(line["url"], **line["body"]))
        assert same(bodies[line["custom_id"]]) == nearly(same(expected)), line


def same(body):
    """Return a response without ids, times and cached tokens."""
    usage = {name: body["usage"][name] for name in ("prompt_tokens", "completion_tokens", "total_tokens")}
    return {**body, "id": "", "created": 0, "usage": usage}


def nearly(value):
    """Return a value that equals others up to the last digits of numbers."""
    if isinstance(value, dict):
        return {name: nearly(each) for name, each in value.items()}
    if isinstance(value, list):
        return [nearly(each) for each in value]
    return pytest.approx(value, abs=2e-3) if isinstance(value, float) else value
