"""Log-probabilities of outputs and prompts, and echoed prompts."""

import pytest

from ... import SamplingParams
from ..testing.served import answer, stream

PROMPT = "Once upon a time"


def test_completion_logprobs(served, llm):
    logprobs = served.completion(PROMPT, logprobs=2, max_tokens=4)["choices"][0]["logprobs"]
    [output] = llm.generate([PROMPT], SamplingParams(temperature=0, max_tokens=4, logprobs=2))
    expected = [place[token].logprob for token, place in zip(*tokens_of(output), strict=True)]
    assert logprobs["token_logprobs"] == pytest.approx(expected, abs=1e-4)
    assert all(len(place) == 2 for place in logprobs["top_logprobs"])
    assert logprobs["text_offset"] == [0, *(sum(map(len, logprobs["tokens"][:i])) for i in (1, 2, 3))]


def tokens_of(output):
    return output.outputs[0].token_ids, output.outputs[0].logprobs


def test_echo_has_the_logprobs_of_the_prompt(served, llm):
    [choice] = served.completion(PROMPT, echo=True, logprobs=1, max_tokens=2)["choices"]
    assert choice["text"] == PROMPT + served.completion(PROMPT, max_tokens=2)["choices"][0]["text"]
    logprobs = choice["logprobs"]
    params = SamplingParams(temperature=0, max_tokens=2, logprobs=1, prompt_logprobs=1)
    [output] = llm.generate([PROMPT], params)
    tokens, places = tokens_of(output)
    pairs = zip([*output.prompt_token_ids[1:], *tokens], [*output.prompt_logprobs[1:], *places], strict=True)
    expected = [place[token].logprob for token, place in pairs]
    assert logprobs["token_logprobs"][0] is logprobs["top_logprobs"][0] is None
    assert logprobs["token_logprobs"][1:] == pytest.approx(expected, abs=1e-4)


def test_echo_with_max_tokens_0_returns_only_the_prompt(served):
    body = {"prompt": PROMPT, "echo": True, "max_tokens": 0, "logprobs": 1}
    response = served.completion(**body)
    [choice], usage = response["choices"], response["usage"]
    assert (choice["text"], choice["finish_reason"], usage["completion_tokens"]) == (PROMPT, "length", 0)
    assert len(choice["logprobs"]["tokens"]) == usage["prompt_tokens"]
    chunk, done = stream(served, "/v1/completions", **body)
    assert chunk["choices"] == [choice] and done == "[DONE]"


def test_echo_has_the_text_of_the_first_token(served):
    ids = answer(served.post("/tokenize", prompt="Once upon", add_special_tokens=False))["tokens"]
    logprobs = served.completion(ids, echo=True, logprobs=0, max_tokens=1)["choices"][0]["logprobs"]
    assert logprobs["tokens"][:2] == ["Once", " upon"] and logprobs["token_logprobs"][0] is None
    [choice] = served.completion(echo=True, logprobs=0, max_tokens=4)["choices"]
    for token, start in zip(choice["logprobs"]["tokens"], choice["logprobs"]["text_offset"], strict=True):
        assert choice["text"][start : start + len(token)] == token


def test_prompt_logprobs(served, llm):
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=2)
    [output] = llm.generate([PROMPT], params)
    choices = served.completion([PROMPT, "The fox"], prompt_logprobs=2, max_tokens=1, n=2)["choices"]
    assert choices[0]["prompt_logprobs"] == choices[1]["prompt_logprobs"] != choices[2]["prompt_logprobs"]
    [first, *places] = choices[0]["prompt_logprobs"]
    assert first is None and len(places) == len(output.prompt_token_ids) - 1
    for place, expected in zip(places, output.prompt_logprobs[1:], strict=True):
        assert [int(token) for token in place] == list(expected)
        for entry, each in zip(place.values(), expected.values(), strict=True):
            assert entry == {**each._asdict(), "logprob": pytest.approx(each.logprob, abs=1e-4)}
    chat = served.chat(prompt_logprobs=0, max_tokens=1)
    assert len(chat["prompt_logprobs"]) == chat["usage"]["prompt_tokens"]


def test_logprob_token_ids_replace_the_top_tokens(served):
    [place] = served.chat(logprobs=True, logprob_token_ids=[500, 7], max_tokens=1)["choices"][0]["logprobs"]["content"]
    assert place["top_logprobs"][0]["token"] == " wor" and len(place["top_logprobs"]) == 2


def test_stream_never_splits_a_character(served):
    """No piece holds part of a character, and offsets point at the text of each token."""
    body = {"prompt": "a", "structured_outputs": {"choice": ["né 🦊狐"]}, "temperature": 0, "max_tokens": 30}
    [whole] = served.completion(**body, logprobs=0)["choices"]
    *chunks, _ = stream(served, "/v1/completions", **body, logprobs=0)
    pieces = [chunk["choices"][0] for chunk in chunks]
    assert "".join(each["text"] for each in pieces) == whole["text"] == "né 🦊狐"
    assert not any("\ufffd" in each["text"] for each in pieces) and any(each["text"] == "🦊" for each in pieces)
    logprobs = whole["logprobs"]
    for name in ("tokens", "text_offset"):
        assert [one for each in pieces for one in each["logprobs"][name]] == logprobs[name]
    for token, start in list(zip(logprobs["tokens"], logprobs["text_offset"], strict=True))[:-1]:
        assert whole["text"][start : start + len(token)] == token
