"""Whatever a body asks for, its stream is the whole answer in pieces."""

import random
from typing import Any

import pytest

from .served import answer, stream

SOMETIMES: dict[str, list[Any]] = {
    "temperature": [0, 0.7, 1.5],
    "top_p": [0.8],
    "top_k": [20],
    "min_p": [0.05],
    "presence_penalty": [1.0],
    "repetition_penalty": [1.1],
    "stop": [[" the", "e w"], "a", ["and", "."], [", "]],
    "include_stop_str_in_output": [True],
    "stop_token_ids": [[270, 300, 414], [261]],
    "logit_bias": [{"261": 3}],
    "bad_words": [[" the"]],
    "skip_special_tokens": [False],
    "structured_outputs": [{"choice": ["né 🦊狐", "foxé"]}, {"regex": "[a-zé🦊]{3,8}"}, {"json_object": True}],
}
PROMPTS = ["Once upon", ["A fox", "né 🦊"], [300, 400], [[300], [400, 261]]]


def some_body(rng: random.Random) -> tuple[str, dict[str, Any]]:
    body = {name: rng.choice(values) for name, values in SOMETIMES.items() if rng.random() < 0.3}
    body |= {"max_tokens": rng.randint(1, 20), "n": rng.choice([1, 1, 2, 3]), "seed": rng.randrange(100)}
    is_told, count = rng.random() < 0.5, rng.randrange(3)
    if rng.random() < 0.4:
        body["messages"] = [{"role": "user", "content": rng.choice(["Hi", "Tell me of é🦊"])}]
        return "/v1/chat/completions", body | ({"logprobs": True, "top_logprobs": count} if is_told else {})
    body |= {"prompt": rng.choice(PROMPTS), "echo": rng.random() < 0.3}
    return "/v1/completions", body | ({"logprobs": count} if is_told else {})


def check(served, seed: int) -> None:
    url, body = some_body(random.Random(seed))
    whole = answer(served.post(url, **body))
    *chunks, last, done = stream(served, url, **body, stream_options={"include_usage": True})
    assert done == "[DONE]" and last["choices"] == []
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert last["usage"][name] == whole["usage"][name]
    for choice in whole["choices"]:
        parts = [each for chunk in chunks for each in chunk["choices"] if each["index"] == choice["index"]]
        assert [each["finish_reason"] for each in parts[:-1]] == [None] * (len(parts) - 1)
        assert parts[-1].get("stop_reason") == choice["stop_reason"]
        assert joined(parts) == joined([choice]), (seed, url, body)


def joined(parts: list[dict[str, Any]]) -> tuple[str, list[Any], str]:
    """Its text, what is told of its tokens, and how it ends."""
    said = [each.get("delta") or each.get("message") or {"content": each.get("text")} for each in parts]
    told = [each["logprobs"] for each in parts if each["logprobs"]]
    tokens = [one["token"] for each in told for one in each.get("content", [])]
    places = [
        pair for each in told if "tokens" in each for pair in zip(each["tokens"], each["text_offset"], strict=True)
    ]
    return "".join(each["content"] for each in said), tokens + places, parts[-1]["finish_reason"]


@pytest.mark.parametrize("seed", range(8))
def test_a_stream_is_the_whole_answer(served, seed):
    check(served, seed)


@pytest.mark.full
def test_many_streams_are_the_whole_answers(served):
    for seed in range(8, 300):
        check(served, seed)
